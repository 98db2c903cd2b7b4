"""The models of a run other than the actor: reference, critic and reward model, and the keys that ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from scalerl.config.layout import LAYOUT_FIELDS, LayoutSizes
from scalerl.config.names import ACTOR, CRITIC_ESTIMATORS, REFERENCE_ESTIMATORS, REFERENCE_LOSSES

if TYPE_CHECKING:
    from scalerl.config.schema import MegatronConfig, PPOConfig, ResourcePoolConfig

RoleName = Literal["ref", "critic", "reward_model"]


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
        return LayoutSizes.of(self.megatron, pool.num_devices)


def uses_critic(cfg: PPOConfig) -> bool:
    """Whether the advantage estimator reads values; true for a user's own estimator only once its file is imported."""
    return cfg.algorithm.adv_estimator in CRITIC_ESTIMATORS


def uses_reference(cfg: PPOConfig) -> bool:
    """Whether a KL, a loss or the estimator reads the reference model; of a user's own once its file is imported."""
    actor, algorithm = cfg.actor_rollout_ref.actor, cfg.algorithm
    return (
        actor.use_kl_loss
        or algorithm.use_kl_in_reward
        or actor.policy_loss.loss_mode in REFERENCE_LOSSES
        or algorithm.adv_estimator in REFERENCE_ESTIMATORS
        or algorithm.distillation_top_k > 0
    )


def all_model_roles(cfg: PPOConfig) -> list[ModelRole]:
    """Lists every role that a run may have; `active` says whether this run has it."""
    policy, critic, reward = cfg.actor_rollout_ref, cfg.critic, cfg.reward_model
    return [
        ModelRole(
            name="ref",
            section="actor_rollout_ref.ref",
            head="lm",
            switch=f"{ACTOR}.use_kl_loss=true, or algorithm.use_kl_in_reward=true"
            if policy.ref.url is None
            else "actor_rollout_ref.ref.url=null",
            # A server's model is none of the run's.
            active=uses_reference(cfg) and policy.ref.url is None,
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
    """Lists the roles that this run has."""
    return [role for role in all_model_roles(cfg) if role.active]


def refers_to_actor(cfg: PPOConfig, role: ModelRole) -> bool:
    """Whether a role is the reference that is the actor's model without its adapter, on the actor's ranks."""
    policy = cfg.actor_rollout_ref
    is_same = policy.ref.model_path is None and not role.has_own_pool
    return role.name == "ref" and policy.model.lora_rank > 0 and is_same


def different_sizes(role: ModelRole, actor: MegatronConfig) -> list[str]:
    """The names among LAYOUT_FIELDS in which a role differs from the actor."""
    return [name for name in LAYOUT_FIELDS if getattr(role.megatron, name) != getattr(actor, name)]
