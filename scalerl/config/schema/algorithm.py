"""The `algorithm` section: advantages, KL in the reward, correction for the sampler, filtering of groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from scalerl.config.correction import IS_LEVELS, RS_OPTIONS, is_bounds, rs_bounds
from scalerl.config.schema.fields import Place, by_value, check, key
from scalerl.config.value_checks import KL_KIND, TEXT, THRESHOLD, UNIT, above, at_least, one_of, or_null, show, some_of


@dataclass
class RolloutCorrectionConfig:
    """Correction where trainer and sampler disagree. Ratio: trainer's probability of a token / sampler's."""

    # Weight of a token in the policy loss: token: its ratio; sequence: the product of its response's ratios;
    # geometric: their geometric mean; null: 1.
    rollout_is: str | None = key(None, or_null(one_of(*IS_LEVELS)))
    # A number: larger weights are cut to it (TIS). [lower, upper] or "lower_upper": weights outside become 0 (MIS; for
    # tokens: IcePop), and the token still counts in the loss's divisor.
    rollout_is_threshold: Any = key(2.0, THRESHOLD)
    # Divide the weights by their mean over the step.
    rollout_is_batch_normalize: bool = False
    # Tests, as a list or separated by commas; a token (token_*) or response (seq_*) that fails one leaves the loss.
    rollout_rs: Any = key(None, or_null(some_of(*RS_OPTIONS, example="[seq_mean_k3]")))
    # One for all tests or one each. k1: [lower, upper] of the ratio, and u means [1/u, u]; k2, k3: largest divergence.
    rollout_rs_threshold: Any = key(None, or_null(THRESHOLD))
    # A response with a token whose ratio is below this leaves the loss; null: none does.
    rollout_token_veto_threshold: float | None = key(None, or_null(above(0, below=1)))
    # Take the sampler's log-probs as old_logprobs, without a pass of the trainer; excludes weights and rejection.
    bypass_mode: bool = False

    @check("rollout_is_threshold")
    def bounds_of_weights(self, at: Place) -> Iterator[str]:
        try:
            is_bounds(self)
        except ValueError as error:
            yield str(error)

    @check("rollout_rs", "rollout_rs_threshold")
    def bounds_of_tests(self, at: Place) -> Iterator[str]:
        try:
            rs_bounds(self)
        except ValueError as error:
            yield str(error)

    @check("rollout_is_batch_normalize", "rollout_is")
    def weights_to_normalize(self, at: Place) -> Iterator[str]:
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            yield (
                f"{at('rollout_is_batch_normalize')} = true: there are no weights; set {at('rollout_is')}=token, or "
                f"{at('rollout_is_batch_normalize')}=false"
            )

    @check("bypass_mode")
    def nothing_to_correct(self, at: Place) -> Iterator[str]:
        for name in ("rollout_is", "rollout_rs", "rollout_token_veto_threshold"):
            if self.bypass_mode and getattr(self, name) is not None and at.knows(at(name)):
                yield (
                    f"{at(name)} = {show(getattr(self, name))}: {at('bypass_mode')} takes the sampler's log-probs for "
                    f"the trainer's, so that every ratio is 1; set {at(name)}=null, or {at('bypass_mode')}=false"
                )


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476): train on train_batch_size groups whose samples differ."""

    # Drop groups whose samples all have the same metric, and refill the batch with the groups of other prompts.
    enable: bool = False
    # score, which is before penalties, or a number that the reward function returns beside it.
    metric: str = key("score", TEXT)
    # Rounds of up to data.gen_batch_size prompts that fill a batch. Groups whose samples are alike fill what is
    # missing then; a step without any other ends the run.
    max_num_gen_batches: int = key(10, at_least(1))


@dataclass
class KLControlConfig:
    """The weight of the KL in the reward."""

    # fixed: kl_coef stays; adaptive: it moves towards target_kl.
    type: str = key("fixed", one_of("fixed", "adaptive"))
    # Weight of the KL in the reward; adaptive: at the start.
    kl_coef: float = key(0.001, at_least(0))
    # adaptive: samples over which the weight would move by the whole relative error.
    horizon: float = key(10000.0, above(0))
    # adaptive: the KL that the weight is steered to, in nats per token.
    target_kl: float = key(0.1, above(0))


# Servers in fp8 sample from rounded weights, so each token is weighed by its ratio.
_WEIGHTS_OF_FP8 = by_value("actor_rollout_ref.rollout.quantization", ("fp8",), "token", None)


@dataclass
class AlgorithmConfig:
    """Advantages, the KL in the reward, and what is corrected or filtered before an update."""

    # gae (has a critic) | grpo | grpo_passk | rloo | opo | gpg | remax | reinforce_plus_plus |
    # reinforce_plus_plus_baseline, or a name registered with algorithms.register_adv_est.
    adv_estimator: str = key("grpo", TEXT)
    # Divide by the standard deviation of the group (grpo, grpo_passk).
    norm_adv_by_std_in_grpo: bool = True
    # Each turn of a program has its own advantage: an estimator that compares samples compares what they earn from a
    # turn on, discounted by gamma for each turn.
    turn_level: bool = False
    # Discount of rewards per token (gae, reinforce_plus_plus), or per turn (turn_level).
    gamma: float = key(1.0, UNIT)
    # Weight of longer returns in gae: 1: whole returns less the value; 0: one token ahead.
    lam: float = key(1.0, UNIT)
    # Take the KL to the reference model off the reward of each token.
    use_kl_in_reward: bool = False
    # Estimate of that KL: as kl_loss_type; a + changes nothing here, where there is no gradient.
    kl_penalty: str = key("kl", KL_KIND)
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    # Words that a teacher, the reference model, finds likeliest for each token, from which the policy learns by the KL
    # between the two (docs/algorithms.md); 0: none.
    distillation_top_k: int = key(0, at_least(0))
    # Weight in the loss of that KL.
    distillation_coef: float = key(1.0, above(0))
    rollout_correction: RolloutCorrectionConfig = field(
        default_factory=lambda: RolloutCorrectionConfig(rollout_is=_WEIGHTS_OF_FP8)
    )
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    # Of a mixture of experts. rollout: log-probs and updates of the actor take, for each token, the experts that the
    # sampler's routers chose, so that near ties which fall otherwise in the trainer change nothing
    # (docs/models.md); null: the trainer's routers choose.
    routing_replay: str | None = key(None, or_null(one_of("rollout")))

    @check("use_kl_in_reward", "kl_penalty", "kl_ctrl")
    def kl_in_the_reward(self, at: Place) -> Iterator[str]:
        control, default = asdict(self.kl_ctrl), asdict(KLControlConfig())
        changed = {f"kl_ctrl.{name}": value for name, value in control.items() if value != default[name]}
        if self.kl_penalty != AlgorithmConfig.kl_penalty:
            changed = {"kl_penalty": self.kl_penalty} | changed
        # A weight of 0 asks for no KL, and there is none.
        changed = {name: value for name, value in changed.items() if (name, value) != ("kl_ctrl.kl_coef", 0)}
        if changed and not self.use_kl_in_reward:
            first, value = next(iter(changed.items()))
            yield (
                f"{at(first)} = {show(value)}: has no effect when {at('use_kl_in_reward')} = false; set "
                f"{at('use_kl_in_reward')}=true, or leave {', '.join(map(at, changed))} out"
            )
