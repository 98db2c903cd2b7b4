"""The models that PPO trains or compares with: actor, critic and reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from scalerl.config.names import ACTOR
from scalerl.config.schema.devices import ResourcePoolConfig
from scalerl.config.schema.fields import Place, at_most, check, key, same_as, times
from scalerl.config.schema.model import (
    MegatronConfig,
    MicroBatchConfig,
    ModelCodeConfig,
    OptimConfig,
    TrainedPartsConfig,
    as_actor,
)
from scalerl.config.value_checks import (
    FINITE,
    FRACTION,
    KL_KIND,
    SERVER_URL,
    TEXT,
    VARIABLE,
    above,
    at_least,
    one_of,
    or_null,
)

LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@dataclass
class PolicyLossConfig:
    """The policy loss and the parameters of its kinds."""

    # vanilla | gspo | cispo | geo_mean | sapo | gpg | dro | clip_cov | kl_cov, or a name registered with
    # algorithms.register_policy_loss.
    loss_mode: str = key("vanilla", TEXT)
    # clip_cov: share of a mini-batch's loss tokens that lose their gradient.
    clip_cov_ratio: float = key(0.0002, FRACTION)
    # clip_cov: those tokens have a covariance of advantage and log-prob between this and clip_cov_ub.
    clip_cov_lb: float = key(1.0, FINITE)
    # clip_cov: the largest such covariance; must exceed clip_cov_lb.
    clip_cov_ub: float = key(5.0, FINITE)
    # kl_cov: share of a mini-batch's loss tokens, those of the greatest covariance, that are held back.
    kl_cov_ratio: float = key(0.0002, FRACTION)
    # kl_cov: weight in the loss of the absolute log-ratio of those tokens.
    ppo_kl_coef: float = key(0.1, at_least(0))
    # dro: weight of the squared log-ratio in the loss; loss_mode=dro needs it.
    dro_beta: float | None = key(None, or_null(above(0)))

    @check("clip_cov_lb", "clip_cov_ub")
    def covariance_band(self, at: Place) -> Iterator[str]:
        lower, upper = self.clip_cov_lb, self.clip_cov_ub
        if lower >= upper:
            yield (
                f"{at('clip_cov_lb')} = {lower:g}: must be below {at('clip_cov_ub')} = {upper:g}; set "
                f"{at('clip_cov_ub')}={lower + 1:g} or more"
            )

    @check("loss_mode", "dro_beta")
    def weight_of_dro(self, at: Place) -> Iterator[str]:
        if self.loss_mode == "dro" and self.dro_beta is None:
            yield (
                f"{at('dro_beta')} = null: loss_mode = dro needs the weight of its squared log-ratio; set "
                f"{at('dro_beta')}=0.1, or another number above 0"
            )


@dataclass
class PPOModelConfig:
    """The keys that actor and critic have in common: how a step's samples become updates."""

    # Prompts per optimizer update (times rollout.n = samples).
    ppo_mini_batch_size: int = key(at_most(256, "data.train_batch_size"), at_least(1))
    # Tokens of a packed micro-batch, over all devices that share its samples.
    max_tokens_per_micro_batch: int = key(times(16384, f"{ACTOR}.megatron.context_parallel_size"), at_least(1))
    # Passes over a step's samples.
    ppo_epochs: int = key(1, at_least(1))
    # How the losses of tokens become one number (docs/algorithms.md).
    loss_agg_mode: str = key("token-mean", one_of(*LOSS_AGG_MODES))
    # seq-mean-token-sum-norm: what a sample's sum is divided by.
    loss_scale_factor: float = key(same_as("data.max_response_length"), above(0, example=1024))
    optim: OptimConfig = field(default_factory=OptimConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)


@dataclass
class ActorConfig(PPOModelConfig):
    """The policy that PPO trains."""

    # Sets both sides; clip_ratio_low and clip_ratio_high override it.
    clip_ratio: float = key(0.2, above(0, below=1))
    # The ratio counts down to 1 - clip_ratio_low; null: clip_ratio.
    clip_ratio_low: float | None = key(None, or_null(above(0, below=1)))
    # The ratio counts up to 1 + clip_ratio_high; null: clip_ratio.
    clip_ratio_high: float | None = key(None, or_null(above(0)))
    # Dual clip: largest ratio that counts for a negative advantage.
    clip_ratio_c: float = key(3.0, above(1))
    # sapo: how fast a token's gradient fades as its ratio leaves 1, where the advantage is above 0.
    tau_pos: float = key(1.0, above(0))
    # sapo: the same where the advantage is not above 0.
    tau_neg: float = key(1.05, above(0))
    # Weight of the entropy that the loss rewards.
    entropy_coeff: float = key(0.0, FINITE)
    # Add the KL to the reference model to the loss.
    use_kl_loss: bool = False
    kl_loss_coef: float = key(0.001, at_least(0))
    # k1 is kl, k2 mse, k3 low_var_kl; with a + behind it the gradient is that of k2.
    kl_loss_type: str = key("low_var_kl", KL_KIND)
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)


@dataclass
class CriticModelConfig(TrainedPartsConfig, ModelCodeConfig):
    """The files of the critic."""

    # Directory of a language model, whose head a value head replaces, or of a critic.
    path: str = key(same_as("actor_rollout_ref.model.path"), TEXT)
    trust_remote_code: bool = same_as("actor_rollout_ref.model.trust_remote_code")


@dataclass
class CriticConfig(MicroBatchConfig, PPOModelConfig):
    """The value model of algorithm.adv_estimator=gae, and of estimators of your own that need values."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    ppo_mini_batch_size: int = same_as(f"{ACTOR}.ppo_mini_batch_size")
    ppo_epochs: int = same_as(f"{ACTOR}.ppo_epochs")
    loss_agg_mode: str = same_as(f"{ACTOR}.loss_agg_mode")
    loss_scale_factor: float = same_as(f"{ACTOR}.loss_scale_factor")
    # A value counts in the loss up to this far from what it was when the step began.
    cliprange_value: float = key(0.5, above(0))
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    megatron: MegatronConfig = field(default_factory=as_actor)
    resource_pool: ResourcePoolConfig = field(default_factory=ResourcePoolConfig)


@dataclass
class RefConfig(MicroBatchConfig):
    """The frozen reference model that the KL compares the policy with, or the teacher that it learns from."""

    # Directory of the reference model; null: the actor's starting weights.
    model_path: str | None = key(None, or_null(TEXT))
    # Address of an SGLang server that has the reference model, with the policy's tokenizer; null: the run's devices
    # have it.
    url: str | None = key(None, or_null(SERVER_URL))
    # Environment variable with the key of that server; null: it needs none.
    api_key_env: str | None = key(None, or_null(VARIABLE))
    megatron: MegatronConfig = field(default_factory=as_actor)
    resource_pool: ResourcePoolConfig = field(default_factory=ResourcePoolConfig)

    @check("url", "model_path", "api_key_env")
    def one_place_for_the_model(self, at: Place) -> Iterator[str]:
        if self.url is not None and self.model_path is not None:
            yield (
                f"{at('url')} = {self.url}: the server has the reference model, and {at('model_path')} = "
                f"{self.model_path} would be on the run's devices; set {at('url')}=null, or {at('model_path')}=null"
            )
        if self.url is None and self.api_key_env is not None:
            yield (
                f"{at('api_key_env')} = {self.api_key_env}: has no effect when {at('url')} = null; set "
                f"{at('api_key_env')}=null"
            )
