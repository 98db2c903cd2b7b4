"""Rules of the models beside the actor: `model_roles`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scalerl.config.model_specs import LAYOUT_FIELDS, ModelRole, RoleName, all_model_roles, different_sizes
from scalerl.config.registered_names import ESTIMATORS
from scalerl.config.rules.base import Rule, divisors, nearest, nearest_multiples
from scalerl.config.rules.layout import (
    ACTOR,
    ROLLOUT,
    aligning_keys,
    devices_per_model,
    dividing_sizes,
    micro_batch_multiple,
    tokens_per_device,
)
from scalerl.config.rules.section import lr_rules, megatron_rules
from scalerl.config.schema import PPOConfig
from scalerl.config.value_checks import show


def _role(cfg: PPOConfig, name: RoleName) -> ModelRole:
    return next(role for role in all_model_roles(cfg) if role.name == name)


def _may_have_critic(cfg: PPOConfig, name: RoleName) -> bool:
    """An estimator of the user's own may ask for one; whether it does is known once its file is imported."""
    return name == "critic" and cfg.algorithm.adv_estimator not in ESTIMATORS


def role_rules(name: RoleName, section: str, budget_key: str) -> list[Rule]:
    """Of a model beside the actor; a rule holds only where the run has it."""
    megatron, pool = f"{section}.megatron", f"{section}.resource_pool"
    sizes = [f"{prefix}.{size}" for prefix in (megatron, f"{ACTOR}.megatron") for size in LAYOUT_FIELDS]
    nodes = (f"{pool}.nnodes", f"{pool}.n_gpus_per_node")

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

    def pool_of_its_own(cfg: PPOConfig) -> Iterator[str]:
        role = _role(cfg, name)
        if role.has_own_pool and not role.active and not _may_have_critic(cfg, name):
            yield (
                f"{pool}.nnodes = {role.pool.nnodes}: has no effect, this run has no {section}; set {role.switch}, or "
                f"{pool}.nnodes=0"
            )
        model = devices_per_model(role.megatron)
        if role.active and role.has_own_pool and role.world_size(cfg) % model:
            used = " x ".join(f"{megatron}.{size}" for size in dividing_sizes(role.megatron))
            unit = model // math.gcd(model, role.pool.nnodes)
            yield (
                f"{pool}.nnodes x {pool}.n_gpus_per_node = {role.pool.nnodes} x {role.pool.n_gpus_per_node} = "
                f"{role.world_size(cfg)}: must be a multiple of {used} = {model}; set {pool}.n_gpus_per_node="
                f"{nearest_multiples(role.pool.n_gpus_per_node, unit)}"
            )

    def budget(cfg: PPOConfig) -> Iterator[str]:
        role = _role(cfg, name)
        longest = cfg.data.max_prompt_length + cfg.data.max_response_length
        needed = tokens_per_device(longest, role.megatron)
        if role.active and role.max_tokens_per_device < needed and not _is_the_actors_budget(cfg, role):
            yield (
                f"{section}.{budget_key} = {role.max_tokens_per_device}: must hold the longest sample, "
                f"data.max_prompt_length + data.max_response_length = {longest}; set {section}.{budget_key}={needed} "
                "or more"
            )

    return [
        Rule((*sizes, *nodes, "algorithm.adv_estimator"), layout_of_the_actor),
        Rule((*sizes, *nodes, "trainer.nnodes", "trainer.n_gpus_per_node"), pool_of_its_own),
        Rule(
            (
                "data.max_prompt_length",
                "data.max_response_length",
                f"{section}.{budget_key}",
                *aligning_keys(megatron),
                *aligning_keys(f"{ACTOR}.megatron"),
            ),
            budget,
        ),
    ]


def _is_the_actors_budget(cfg: PPOConfig, role: ModelRole) -> bool:
    """The same key and the same layout: `_token_budget` says it."""
    actor = cfg.actor_rollout_ref.actor
    return role.max_tokens_per_device == actor.ppo_max_token_len_per_gpu and not different_sizes(role, actor.megatron)


def _critic_mini_batches(cfg: PPOConfig) -> Iterator[str]:
    role, prompts, mini = _role(cfg, "critic"), cfg.data.train_batch_size, cfg.critic.ppo_mini_batch_size
    if not role.active or mini == cfg.actor_rollout_ref.actor.ppo_mini_batch_size:
        return
    if prompts % mini:
        yield (
            f"critic.ppo_mini_batch_size = {mini}: must divide data.train_batch_size = {prompts}; set "
            f"critic.ppo_mini_batch_size={nearest(mini, divisors(prompts))}"
        )


def _critic_feeds_ranks(cfg: PPOConfig) -> Iterator[str]:
    role, mini, n = _role(cfg, "critic"), cfg.critic.ppo_mini_batch_size, cfg.actor_rollout_ref.rollout.n
    if not role.active or role.world_size(cfg) % devices_per_model(role.megatron):
        return
    ranks = role.dp_size(cfg) * micro_batch_multiple(role.megatron)
    same = mini == cfg.actor_rollout_ref.actor.ppo_mini_batch_size and not role.has_own_pool
    if mini * n < ranks and not same:
        yield (
            f"critic.ppo_mini_batch_size x {ROLLOUT}.n = {mini} x {n} = {mini * n} samples: must be at least "
            f"{ranks}, so that each of the critic's {role.dp_size(cfg)} data-parallel ranks has its micro-batches; set "
            f"critic.ppo_mini_batch_size={math.ceil(ranks / n)} or more, or give the critic fewer devices"
        )


def _critic_warmup(cfg: PPOConfig) -> Iterator[str]:
    if cfg.trainer.critic_warmup and not _role(cfg, "critic").active and not _may_have_critic(cfg, "critic"):
        yield (
            f"trainer.critic_warmup = {cfg.trainer.critic_warmup}: this run has no critic that could learn first; set "
            "trainer.critic_warmup=0, or algorithm.adv_estimator=gae"
        )


def _kept_together(cfg: PPOConfig) -> Iterator[str]:
    actor, critic = cfg.trainer.max_actor_ckpt_to_keep, cfg.trainer.max_critic_ckpt_to_keep
    if actor != critic:
        yield (
            f"trainer.max_critic_ckpt_to_keep = {show(critic)}: a checkpoint holds actor and critic and goes as a "
            f"whole, so it must be trainer.max_actor_ckpt_to_keep = {show(actor)}; set both to one number, or leave "
            "trainer.max_critic_ckpt_to_keep out"
        )


def _reward_model_given(cfg: PPOConfig) -> Iterator[str]:
    reward = cfg.reward_model
    if reward.enable and reward.model.path is None:
        yield (
            "reward_model.model.path = null: needed when reward_model.enable = true; set it to the directory of a "
            "model with a score head, or reward_model.enable=false"
        )
    if not reward.enable and reward.model.path is not None:
        yield (
            f"reward_model.model.path = {reward.model.path}: has no effect when reward_model.enable = false; set "
            "reward_model.enable=true, or reward_model.model.path=null"
        )


ROLE_RULES = [
    *role_rules("ref", "actor_rollout_ref.ref", "log_prob_max_token_len_per_gpu"),
    *megatron_rules("actor_rollout_ref.ref.megatron", unless=f"{ACTOR}.megatron"),
    *role_rules("critic", "critic", "ppo_max_token_len_per_gpu"),
    *megatron_rules("critic.megatron", unless=f"{ACTOR}.megatron"),
    *lr_rules("critic.optim"),
    Rule((f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size", "critic.ppo_mini_batch_size"), _critic_mini_batches),
    Rule(
        (
            f"{ROLLOUT}.n",
            f"{ACTOR}.ppo_mini_batch_size",
            "critic.ppo_mini_batch_size",
            "critic.resource_pool.nnodes",
            "critic.resource_pool.n_gpus_per_node",
            "trainer.nnodes",
            "trainer.n_gpus_per_node",
            *(f"critic.megatron.{size}" for size in LAYOUT_FIELDS),
        ),
        _critic_feeds_ranks,
    ),
    Rule(("trainer.critic_warmup", "algorithm.adv_estimator"), _critic_warmup),
    Rule(("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"), _kept_together),
    *role_rules("reward_model", "reward_model", "forward_max_token_len_per_gpu"),
    *megatron_rules("reward_model.megatron", unless=f"{ACTOR}.megatron"),
    Rule(("reward_model.model.path",), _reward_model_given),
]
