"""Rules of the models beside the actor, which `config.model_specs` lists."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scalerl.config.batch_sizes import (
    LONGEST_SAMPLE,
    LONGEST_SAMPLE_KEYS,
    fewest_samples,
    longest_sample,
    tokens_needed,
)
from scalerl.config.layout_checks import dividing_sizes
from scalerl.config.model_specs import LAYOUT_FIELDS, ModelRole, RoleName, all_model_roles, different_sizes
from scalerl.config.registered_names import ESTIMATORS
from scalerl.config.rules.base import Rule, rule
from scalerl.config.rules.megatron import megatron_rules
from scalerl.config.rules.optimizer import optimizer_rules
from scalerl.config.schema import PPOConfig
from scalerl.config.sections import ACTOR, ROLLOUT, alignment_keys
from scalerl.config.suggestions import divisors, nearest, nearest_multiples
from scalerl.config.value_checks import show


def _role(cfg: PPOConfig, name: RoleName) -> ModelRole:
    return next(role for role in all_model_roles(cfg) if role.name == name)


def _may_have_critic(cfg: PPOConfig, name: RoleName) -> bool:
    """Whether a user's own estimator may ask for a critic: this is known once its file is imported."""
    return name == "critic" and cfg.algorithm.adv_estimator not in ESTIMATORS


def role_rules(name: RoleName, section: str) -> list[Rule]:
    """Makes the rules of one role; each rule holds only where the run has this role."""
    megatron, pool = f"{section}.megatron", f"{section}.resource_pool"
    key = f"{section}.max_tokens_per_micro_batch"
    sizes = [f"{prefix}.{size}" for prefix in (megatron, f"{ACTOR}.megatron") for size in LAYOUT_FIELDS]
    nodes = (f"{pool}.nnodes", f"{pool}.n_gpus_per_node")

    @rule(*sizes, *nodes, "algorithm.adv_estimator")
    def layout_of_the_actor(cfg: PPOConfig) -> Iterator[str]:
        role, actor = _role(cfg, name), cfg.actor_rollout_ref.actor.megatron
        if not role.active or role.has_own_pool:
            return
        for size in different_sizes(role, actor):
            yield (
                f"{megatron}.{size} = {show(getattr(role.megatron, size))}: shares the actor's processes, whose "
                f"{ACTOR}.megatron.{size} is {show(getattr(actor, size))}; set it to that, or give the {section} "
                f"devices of its own with {pool}.nnodes=1"
            )

    @rule(*sizes, *nodes, "trainer.nnodes", "trainer.n_gpus_per_node")
    def pool_of_its_own(cfg: PPOConfig) -> Iterator[str]:
        role = _role(cfg, name)
        if not role.has_own_pool:
            return
        if not role.active and not _may_have_critic(cfg, name):
            yield (
                f"{pool}.nnodes = {role.pool.nnodes}: has no effect, this run has no {section}; set {role.switch}"
                f"{'' if role.model_path else f' and {section}.model.path=DIRECTORY'}, or {pool}.nnodes=0"
            )
        layout = role.layout(cfg)
        if role.active and layout.world_size % layout.copy_size:
            used = " x ".join(f"{megatron}.{size}" for size in dividing_sizes(role.megatron))
            unit = layout.copy_size // math.gcd(layout.copy_size, role.pool.nnodes)
            yield (
                f"{pool}.nnodes x {pool}.n_gpus_per_node = {role.pool.nnodes} x {role.pool.n_gpus_per_node} = "
                f"{layout.world_size}: must be a multiple of {used} = {layout.copy_size}; set {pool}.n_gpus_per_node="
                f"{nearest_multiples(role.pool.n_gpus_per_node, unit)}"
            )

    @rule(*LONGEST_SAMPLE_KEYS, key, *alignment_keys(megatron), *alignment_keys(f"{ACTOR}.megatron"))
    def longest_sample_fits(cfg: PPOConfig) -> Iterator[str]:
        role, longest = _role(cfg, name), longest_sample(cfg)
        needed, actor = tokens_needed(longest, role.megatron), cfg.actor_rollout_ref.actor
        # The actor's number on the actor's layout is checked by the actor's own rule.
        same = role.max_tokens_per_micro_batch == actor.max_tokens_per_micro_batch
        is_the_actors = same and not different_sizes(role, actor.megatron)
        if role.active and role.max_tokens_per_micro_batch < needed and not is_the_actors:
            yield (
                f"{key} = {role.max_tokens_per_micro_batch}: must hold the longest sample, {LONGEST_SAMPLE} = "
                f"{longest}; set {key}={needed} or more"
            )

    return [layout_of_the_actor, pool_of_its_own, longest_sample_fits]


@rule(f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size", "critic.ppo_mini_batch_size")
def _critic_mini_batches(cfg: PPOConfig) -> Iterator[str]:
    role, prompts, mini = _role(cfg, "critic"), cfg.data.train_batch_size, cfg.critic.ppo_mini_batch_size
    if not role.active or mini == cfg.actor_rollout_ref.actor.ppo_mini_batch_size:
        return
    if prompts % mini:
        yield (
            f"critic.ppo_mini_batch_size = {mini}: must divide data.train_batch_size = {prompts}; set "
            f"critic.ppo_mini_batch_size={nearest(mini, divisors(prompts))}"
        )


@rule(
    f"{ROLLOUT}.n",
    f"{ACTOR}.ppo_mini_batch_size",
    "critic.ppo_mini_batch_size",
    "critic.resource_pool.nnodes",
    "critic.resource_pool.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    *(f"critic.megatron.{size}" for size in LAYOUT_FIELDS),
)
def _critic_feeds_ranks(cfg: PPOConfig) -> Iterator[str]:
    role, mini, n = _role(cfg, "critic"), cfg.critic.ppo_mini_batch_size, cfg.actor_rollout_ref.rollout.n
    layout = role.layout(cfg)
    if not role.active or layout.world_size % layout.copy_size:
        return
    needed, _ = fewest_samples(layout)
    same = mini == cfg.actor_rollout_ref.actor.ppo_mini_batch_size and not role.has_own_pool
    if mini * n < needed and not same:
        yield (
            f"critic.ppo_mini_batch_size x {ROLLOUT}.n = {mini} x {n} = {mini * n} samples: must be at least "
            f"{needed}, so that each of the critic's {layout.dp_size} data-parallel ranks has its micro-batches; set "
            f"critic.ppo_mini_batch_size={math.ceil(needed / n)} or more, or give the critic fewer devices"
        )


@rule("trainer.critic_warmup", "algorithm.adv_estimator")
def _critic_warmup(cfg: PPOConfig) -> Iterator[str]:
    if cfg.trainer.critic_warmup and not _role(cfg, "critic").active and not _may_have_critic(cfg, "critic"):
        yield (
            f"trainer.critic_warmup = {cfg.trainer.critic_warmup}: this run has no critic that could learn first; set "
            "algorithm.adv_estimator=gae, or trainer.critic_warmup=0"
        )


@rule("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep")
def _kept_together(cfg: PPOConfig) -> Iterator[str]:
    actor, critic = cfg.trainer.max_actor_ckpt_to_keep, cfg.trainer.max_critic_ckpt_to_keep
    if actor != critic:
        yield (
            f"trainer.max_critic_ckpt_to_keep = {show(critic)}: a checkpoint holds actor and critic and goes as a "
            f"whole, so it must be trainer.max_actor_ckpt_to_keep = {show(actor)}; set "
            f"trainer.max_actor_ckpt_to_keep={show(critic)}, or leave trainer.max_critic_ckpt_to_keep out"
        )


@rule("actor_rollout_ref.ref.model_path")
def _reference_used(cfg: PPOConfig) -> Iterator[str]:
    path = cfg.actor_rollout_ref.ref.model_path
    if path is not None and not _role(cfg, "ref").active:
        yield (
            f"actor_rollout_ref.ref.model_path = {path}: has no effect when {ACTOR}.use_kl_loss and "
            f"algorithm.use_kl_in_reward are false; set {ACTOR}.use_kl_loss=true or algorithm.use_kl_in_reward=true, "
            "or actor_rollout_ref.ref.model_path=null"
        )


@rule("reward_model.model.path")
def _reward_model_given(cfg: PPOConfig) -> Iterator[str]:
    reward = cfg.reward_model
    if reward.enable and reward.model.path is None:
        yield (
            "reward_model.model.path = null: needed when reward_model.enable = true; set "
            "reward_model.model.path=DIRECTORY, of a model with a score head, or reward_model.enable=false"
        )
    if not reward.enable and reward.model.path is not None:
        yield (
            f"reward_model.model.path = {reward.model.path}: has no effect when reward_model.enable = false; set "
            "reward_model.enable=true, or reward_model.model.path=null"
        )


def _all_rules_of(name: RoleName, section: str) -> list[Rule]:
    return [
        *role_rules(name, section),
        *megatron_rules(f"{section}.megatron", unless=f"{ACTOR}.megatron"),
    ]


ROLE_RULES = [
    _reference_used,
    *_all_rules_of("ref", "actor_rollout_ref.ref"),
    *_all_rules_of("critic", "critic"),
    *optimizer_rules("critic.optim"),
    _critic_mini_batches,
    _critic_feeds_ranks,
    _critic_warmup,
    _kept_together,
    *_all_rules_of("reward_model", "reward_model"),
    _reward_model_given,
]
