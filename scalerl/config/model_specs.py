"""The models of a run beside the actor and its pools of devices: which it has, and the keys that say so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from scalerl.config.layout_sizes import LayoutSizes
from scalerl.config.registered_names import CRITIC_ESTIMATORS, REFERENCE_LOSSES
from scalerl.config.schema import GenerationConfig, MegatronConfig, PPOConfig, ResourcePoolConfig, SFTConfig
from scalerl.config.sections import ACTOR, JUDGE, ROLLOUT

RoleName = Literal["ref", "critic", "reward_model"]

# Sizes that fix the process groups, which all models of a process share.
LAYOUT_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "context_parallel_size",
    "hierarchical_context_parallel_sizes",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


@dataclass(frozen=True)
class ModelRole:
    """A model other than the actor, as one configuration describes it.

    section: what its keys start with.  head: lm | value.  switch: the override with which a run has this model.
    """

    name: RoleName
    section: str
    head: Literal["lm", "value"]
    switch: str
    active: bool
    model_path: str | None
    trust_remote_code: bool
    megatron: MegatronConfig
    pool: ResourcePoolConfig
    max_tokens_per_micro_batch: int

    @property
    def has_own_pool(self) -> bool:
        """Whether the model has devices of its own."""
        return self.pool.nnodes > 0

    @property
    def model_key(self) -> str:
        """The key that names its model."""
        return f"{self.section}.{'model_path' if self.name == 'ref' else 'model.path'}"

    def layout(self, cfg: PPOConfig) -> LayoutSizes:
        """The model's layout on its own pool, or on the trainer's devices."""
        pool = self.pool if self.has_own_pool else cfg.trainer
        return LayoutSizes.of(self.megatron, pool.nnodes * pool.n_gpus_per_node)


def uses_critic(cfg: PPOConfig) -> bool:
    """Whether the advantage estimator reads values; true for a user's own estimator only once its file is imported."""
    return cfg.algorithm.adv_estimator in CRITIC_ESTIMATORS


def uses_reference(cfg: PPOConfig) -> bool:
    """Whether a KL or the policy loss reads ref_logprobs; of a user's own loss once its file is imported."""
    actor = cfg.actor_rollout_ref.actor
    return actor.use_kl_loss or cfg.algorithm.use_kl_in_reward or actor.policy_loss.loss_mode in REFERENCE_LOSSES


def all_model_roles(cfg: PPOConfig) -> list[ModelRole]:
    """Lists every role that a run may have; `active` says whether this run has it."""
    policy, critic, reward = cfg.actor_rollout_ref, cfg.critic, cfg.reward_model
    return [
        ModelRole(
            name="ref",
            section="actor_rollout_ref.ref",
            head="lm",
            switch=f"{ACTOR}.use_kl_loss=true, or algorithm.use_kl_in_reward=true",
            active=uses_reference(cfg),
            model_path=policy.ref.model_path or policy.model.path,
            trust_remote_code=policy.model.trust_remote_code,
            megatron=policy.ref.megatron,
            pool=policy.ref.resource_pool,
            max_tokens_per_micro_batch=policy.ref.max_tokens_per_micro_batch,
        ),
        ModelRole(
            name="critic",
            section="critic",
            head="value",
            switch="algorithm.adv_estimator=gae",
            active=uses_critic(cfg),
            model_path=critic.model.path,
            trust_remote_code=critic.model.trust_remote_code,
            megatron=critic.megatron,
            pool=critic.resource_pool,
            max_tokens_per_micro_batch=critic.max_tokens_per_micro_batch,
        ),
        ModelRole(
            name="reward_model",
            section="reward_model",
            head="value",
            switch="reward_model.enable=true",
            active=reward.enable,
            model_path=reward.model.path,
            trust_remote_code=reward.model.trust_remote_code,
            megatron=reward.megatron,
            pool=reward.resource_pool,
            max_tokens_per_micro_batch=reward.max_tokens_per_micro_batch,
        ),
    ]


def model_roles(cfg: PPOConfig) -> list[ModelRole]:
    """Lists the roles that this run has beside the actor."""
    return [role for role in all_model_roles(cfg) if role.active]


@dataclass(frozen=True)
class Pool:
    """Nodes that belong together in a run.  section: the section whose keys size the pool."""

    section: str
    nnodes: int
    n_gpus_per_node: int


def pools_of(cfg: PPOConfig | SFTConfig | GenerationConfig) -> Iterator[Pool]:
    """Yields the pools of a run, the trainer's first."""
    yield Pool("trainer", cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node)
    if not isinstance(cfg, PPOConfig):
        return
    judge = cfg.reward_model.judge
    own = {
        f"{ROLLOUT}.resource_pool": None if cfg.actor_rollout_ref.hybrid_engine else cfg.actor_rollout_ref.rollout,
        f"{JUDGE}.resource_pool": judge if judge.enable and judge.resource_pool.nnodes else None,
    }
    for section, servers in own.items():
        if servers is not None:
            yield Pool(section, servers.resource_pool.nnodes, servers.resource_pool.n_gpus_per_node)
    for role in model_roles(cfg):
        if role.has_own_pool:
            yield Pool(f"{role.section}.resource_pool", role.pool.nnodes, role.pool.n_gpus_per_node)


def num_devices(cfg: PPOConfig) -> int:
    """The number of devices of all pools of the run; on CPU, of processes."""
    return sum(pool.nnodes * pool.n_gpus_per_node for pool in pools_of(cfg))


def different_sizes(role: ModelRole, actor: MegatronConfig) -> list[str]:
    """The names among LAYOUT_FIELDS in which a role differs from the actor."""
    return [name for name in LAYOUT_FIELDS if getattr(role.megatron, name) != getattr(actor, name)]
