"""Rules between keys, and between the keys and the model or the machine. Values by themselves: `domains.py`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from scalerl.config.attention_rules import (
    attention_violations,
    transformer_engine_version,
    transformer_engine_violations,
)
from scalerl.config.domains import domain_violations, show
from scalerl.config.keys import inherited_keys
from scalerl.config.layout_rules import (
    ACTOR,
    ROLLOUT,
    aligning_keys,
    devices_per_model,
    dividing_sizes,
    divisors,
    dp_size,
    megatron_of,
    micro_batch_multiple,
    tokens_per_device,
    world_size,
)
from scalerl.config.model_roles import LAYOUT_FIELDS, ModelRole, RoleName, all_model_roles, different_sizes
from scalerl.config.schema import MegatronConfig, PPOConfig, SFTConfig

# Estimators whose baseline is the other samples of the same prompt.
GROUP_ESTIMATORS = ("grpo", "rloo")


def validate_ppo(cfg: PPOConfig, *, device: str | None = None) -> list[str]:
    """Everything that is wrong with `cfg` by itself.

    Args:
        device: cuda or cpu once it is known; None takes trainer.device, where auto skips the rules of one device.
    Returns: "key = value: limit; what to set" for each violation; empty when there is none.
    """
    return _validate(cfg, PPO_RULES, device)


def validate_sft(cfg: SFTConfig, *, device: str | None = None) -> list[str]:
    """As `validate_ppo`, for `scalerl sft`."""
    return _validate(cfg, SFT_RULES, device)


@dataclass(frozen=True)
class Rule:
    """A relation between `keys`; checked only where each of them is inside its own domain."""

    keys: tuple[str, ...]
    check: Callable[[Any], Iterator[str]]


def _validate(cfg: Any, rules: list[Rule], device: str | None) -> list[str]:
    outside = dict(domain_violations(cfg))
    found = said_once(cfg, outside)
    for rule in [*rules, *_device_rules(cfg, device, outside)]:
        if outside.keys().isdisjoint(rule.keys):
            found += rule.check(cfg)
    return found


def said_once(cfg: Any, outside: dict[str, str]) -> list[str]:
    """The violations without those of values that come from another key with the same violation."""
    sources = inherited_keys(type(cfg))

    def repeats(key: str) -> bool:
        return sources.get(key) in outside and _value(cfg, key) == _value(cfg, sources[key])

    return [text for key, text in outside.items() if not repeats(key)]


def _device_rules(cfg: Any, device: str | None, outside: dict[str, str]) -> list[Rule]:
    if "trainer.device" in outside:
        return []
    found = []
    # What is installed counts on the machine that has the devices, which knows them.
    if device is not None or cfg.trainer.device == "cpu":
        found += _transformer_engine_rules(cfg, device or cfg.trainer.device)
    if isinstance(cfg, PPOConfig) and (device or cfg.trainer.device) == "cuda":
        found.append(REPLICAS_ON_CUDA)
    return found


def _transformer_engine_rules(cfg: Any, device: str) -> list[Rule]:
    trained = "megatron" if isinstance(cfg, SFTConfig) else f"{ACTOR}.megatron"
    roles = [] if isinstance(cfg, SFTConfig) else [role for role in all_model_roles(cfg) if role.active]
    others = [
        f"{role.section}.megatron" for role in roles if role.megatron.cp_comm_type != megatron_of(cfg).cp_comm_type
    ]

    def rule(megatron: str) -> Rule:
        def check(cfg: Any) -> Iterator[str]:
            yield from transformer_engine_violations(
                _value(cfg, megatron).cp_comm_type,
                _value(cfg, megatron).context_parallel_size,
                prefix=megatron,
                device=device,
                version=transformer_engine_version(),
            )

        return Rule((f"{megatron}.cp_comm_type", f"{megatron}.context_parallel_size"), check)

    return [rule(megatron) for megatron in (trained, *others)]


def _value(cfg: Any, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), cfg)


def _nearest(value: int, candidates: list[int]) -> str:
    """The closest candidates below and above."""
    below = [c for c in candidates if c <= value]
    above = [c for c in candidates if c > value]
    return " or ".join(str(c) for c in [*below[-1:], *above[:1]])


def _nearest_multiples(value: int, unit: int) -> str:
    down = value // unit * unit
    return _nearest(value, [m for m in (down, down + unit) if m > 0])


# Rules shared by both configs, by the place of their keys


def _world_rule(megatron: str) -> Rule:
    sizes = tuple(
        f"{megatron}.{name}"
        for name in ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    )

    def check(cfg: Any) -> Iterator[str]:
        world, model = world_size(cfg), devices_per_model(_value(cfg, megatron))
        if world % model:
            # With several nodes, the devices per node that work are the multiples of this.
            unit = model // math.gcd(model, cfg.trainer.nnodes)
            used = " x ".join(f"{megatron}.{name}" for name in dividing_sizes(_value(cfg, megatron)))
            yield (
                f"trainer.nnodes x trainer.n_gpus_per_node = {cfg.trainer.nnodes} x {cfg.trainer.n_gpus_per_node} = "
                f"{world}: must be a multiple of {used} = {model}; set trainer.n_gpus_per_node="
                f"{_nearest_multiples(cfg.trainer.n_gpus_per_node, unit)}, or sizes whose product divides {world}"
            )

    chunks = f"{megatron}.virtual_pipeline_model_parallel_size"
    return Rule((*sizes, chunks, "trainer.nnodes", "trainer.n_gpus_per_node"), check)


def _lr_rules(optim: str) -> list[Rule]:
    style, decay, warmup = f"{optim}.lr_decay_style", f"{optim}.lr_decay_steps", f"{optim}.lr_warmup_steps"
    lr, min_lr = f"{optim}.lr", f"{optim}.min_lr"

    def decay_given(cfg: Any) -> Iterator[str]:
        if _value(cfg, style) != "constant" and _value(cfg, decay) is None:
            yield (
                f"{decay} = null: needed when {style} = {_value(cfg, style)}; set it to the optimizer updates of the "
                f"run, or {style}=constant"
            )
        if _value(cfg, style) == "constant" and _value(cfg, decay) is not None:
            yield (
                f"{decay} = {_value(cfg, decay)}: has no effect when {style} = constant; set {style}=linear or "
                f"cosine, or {decay}=null"
            )

    def warmup_before_decay(cfg: Any) -> Iterator[str]:
        if _value(cfg, decay) is not None and _value(cfg, warmup) >= _value(cfg, decay):
            yield (
                f"{warmup} = {_value(cfg, warmup)}: must be below {decay} = {_value(cfg, decay)}; set at most "
                f"{warmup}={_value(cfg, decay) - 1}"
            )

    def floor_below_peak(cfg: Any) -> Iterator[str]:
        if _value(cfg, min_lr) > _value(cfg, lr):
            yield (
                f"{min_lr} = {_value(cfg, min_lr)}: must be at most {lr} = {_value(cfg, lr)}; set "
                f"{min_lr}={_value(cfg, lr)} or less"
            )

    return [
        Rule((style, decay), decay_given),
        Rule((decay, warmup), warmup_before_decay),
        Rule((lr, min_lr), floor_below_peak),
    ]


def _megatron_rules(megatron: str, unless: str | None = None) -> list[Rule]:
    """What megatron-core allows together, whatever the model. unless: another section, whose equal has been judged."""
    granularity, method = f"{megatron}.recompute_granularity", f"{megatron}.recompute_method"
    num_layers, modules = f"{megatron}.recompute_num_layers", f"{megatron}.recompute_modules"
    initial, lowest = f"{megatron}.initial_loss_scale", f"{megatron}.min_loss_scale"

    def recompute(cfg: Any) -> Iterator[str]:
        kind = _value(cfg, granularity)
        if kind == "full":
            if _value(cfg, method) is None:
                yield f"{method} = null: needed when {granularity} = full; set {method}=uniform or block"
            if _value(cfg, num_layers) is None:
                yield (
                    f"{num_layers} = null: needed when {granularity} = full; set {num_layers}=1, which saves most, or "
                    "more"
                )
        else:
            for key in (method, num_layers):
                if _value(cfg, key) is not None:
                    yield (
                        f"{key} = {_value(cfg, key)}: only for {granularity} = full, which is {show(kind)}; set "
                        f"{granularity}=full, or {key}=null"
                    )
        if kind == "selective" and not _value(cfg, modules):
            yield f"{modules} = []: {granularity} = selective needs one at least; set for example {modules}=[core_attn]"
        if kind != "selective" and _value(cfg, modules) != MegatronConfig().recompute_modules:
            yield (
                f"{modules} = {show(_value(cfg, modules))}: has no effect when {granularity} = {show(kind)}; set "
                f"{granularity}=selective, or leave {modules} out"
            )

    def loss_scale(cfg: Any) -> Iterator[str]:
        if _value(cfg, lowest) > _value(cfg, initial):
            yield (
                f"{lowest} = {_value(cfg, lowest):g}: must be at most {initial} = {_value(cfg, initial):g}; set "
                f"{lowest}={_value(cfg, initial):g} or less"
            )

    def attention(cfg: Any) -> Iterator[str]:
        yield from attention_violations(_value(cfg, megatron), prefix=megatron)

    def judged(check: Callable[[Any], Iterator[str]], *keys: str) -> Rule:
        def unless_equal(cfg: Any) -> Iterator[str]:
            if unless is None or _value(cfg, megatron) != _value(cfg, unless):
                yield from check(cfg)

        return Rule(keys, unless_equal)

    return [
        judged(recompute, granularity, method, num_layers, modules),
        judged(loss_scale, initial, lowest),
        judged(
            attention,
            f"{megatron}.cp_comm_type",
            f"{megatron}.hierarchical_context_parallel_sizes",
            f"{megatron}.context_parallel_size",
            f"{megatron}.dtype",
        ),
    ]


def _resume(cfg: Any) -> Iterator[str]:
    mode, path = cfg.trainer.resume_mode, cfg.trainer.resume_from_path
    if mode == "resume_path" and path is None:
        yield (
            "trainer.resume_from_path = null: needed when trainer.resume_mode = resume_path; set it to a "
            "global_step_N directory, or trainer.resume_mode=auto"
        )
    if mode != "resume_path" and path is not None:
        yield (
            f"trainer.resume_from_path = {path}: has no effect when trainer.resume_mode = {mode}; set "
            "trainer.resume_mode=resume_path, or trainer.resume_from_path=null"
        )


RESUME = Rule(("trainer.resume_mode", "trainer.resume_from_path"), _resume)


# Rules of PPO


def _hybrid(cfg: PPOConfig) -> Iterator[str]:
    if not cfg.actor_rollout_ref.hybrid_engine:
        yield (
            "actor_rollout_ref.hybrid_engine = false: trainer and rollout share their devices, pools of their own are "
            "not there yet; set actor_rollout_ref.hybrid_engine=true"
        )


def _mini_batches(cfg: PPOConfig) -> Iterator[str]:
    prompts, mini = cfg.data.train_batch_size, cfg.actor_rollout_ref.actor.ppo_mini_batch_size
    if prompts % mini:
        yield (
            f"{ACTOR}.ppo_mini_batch_size = {mini}: must divide data.train_batch_size = {prompts}; set "
            f"{ACTOR}.ppo_mini_batch_size={_nearest(mini, divisors(prompts))}, or "
            f"data.train_batch_size={_nearest_multiples(prompts, mini)}"
        )


def _mini_batch_feeds_ranks(cfg: PPOConfig) -> Iterator[str]:
    mini, n = cfg.actor_rollout_ref.actor.ppo_mini_batch_size, cfg.actor_rollout_ref.rollout.n
    needed, what = _fewest_samples(cfg)
    if mini * n < needed:
        yield (
            f"{ACTOR}.ppo_mini_batch_size x {ROLLOUT}.n = {mini} x {n} = {mini * n} samples: must be at least the "
            f"{what}; set {ACTOR}.ppo_mini_batch_size={math.ceil(needed / n)} or more, or train on fewer devices"
        )


def _fewest_samples(cfg: PPOConfig | SFTConfig) -> tuple[int, str]:
    """Of a mini-batch, so that every data-parallel rank has its micro-batches; and why."""
    ranks, multiple = dp_size(cfg), micro_batch_multiple(megatron_of(cfg))
    if multiple == 1:
        return ranks, f"{ranks} data-parallel ranks"
    return ranks * multiple, f"{ranks} data-parallel ranks x {multiple} stages of the interleaved pipeline"


def _token_budget(cfg: PPOConfig) -> Iterator[str]:
    budget = cfg.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    needed = tokens_per_device(longest, megatron_of(cfg))
    if budget < needed:
        yield (
            f"{ACTOR}.ppo_max_token_len_per_gpu = {budget}: must hold the longest sample, data.max_prompt_length + "
            f"data.max_response_length = {longest}; set {ACTOR}.ppo_max_token_len_per_gpu={needed} or more"
        )


def _group_baseline(cfg: PPOConfig) -> Iterator[str]:
    name = cfg.algorithm.adv_estimator
    if name in GROUP_ESTIMATORS and cfg.actor_rollout_ref.rollout.n == 1:
        yield (
            f"{ROLLOUT}.n = 1: algorithm.adv_estimator = {name} compares the samples of one prompt, so a group of one "
            f"has no baseline; set {ROLLOUT}.n=2 or more, for example {ROLLOUT}.n=8"
        )


def _greedy_repeats(cfg: PPOConfig) -> Iterator[str]:
    sampling, key = cfg.actor_rollout_ref.rollout.val_kwargs, f"{ROLLOUT}.val_kwargs"
    if sampling.n > 1 and not sampling.do_sample:
        yield (
            f"{key}.n = {sampling.n}: greedy decoding gives the same answer each time; set {key}.do_sample=true, or "
            f"{key}.n=1"
        )


def _reference_used(cfg: PPOConfig) -> Iterator[str]:
    path = cfg.actor_rollout_ref.ref.model_path
    if path is not None and not cfg.actor_rollout_ref.actor.use_kl_loss:
        yield (
            f"actor_rollout_ref.ref.model_path = {path}: has no effect when {ACTOR}.use_kl_loss = false; set "
            f"{ACTOR}.use_kl_loss=true, or actor_rollout_ref.ref.model_path=null"
        )


def _role(cfg: PPOConfig, name: RoleName) -> ModelRole:
    return next(role for role in all_model_roles(cfg) if role.name == name)


def _role_rules(name: RoleName, section: str, budget_key: str) -> list[Rule]:
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
                f"{ACTOR}.megatron.{size} is {show(getattr(actor, size))}; leave it out, or give the {section} devices "
                f"of its own with {pool}.nnodes=1"
            )

    def pool_of_its_own(cfg: PPOConfig) -> Iterator[str]:
        role = _role(cfg, name)
        if role.has_own_pool and not role.active:
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
                f"{_nearest_multiples(role.pool.n_gpus_per_node, unit)}"
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
            f"critic.ppo_mini_batch_size={_nearest(mini, divisors(prompts))}"
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
    if cfg.trainer.critic_warmup and not _role(cfg, "critic").active:
        yield (
            f"trainer.critic_warmup = {cfg.trainer.critic_warmup}: this run has no critic that could learn first; set "
            "trainer.critic_warmup=0, or algorithm.adv_estimator=gae"
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


def _replicas_on_cuda(cfg: PPOConfig) -> Iterator[str]:
    rollout, per_node, world = cfg.actor_rollout_ref.rollout, cfg.trainer.n_gpus_per_node, world_size(cfg)
    tp_size = rollout.tensor_model_parallel_size
    if per_node % tp_size:
        yield (
            f"{ROLLOUT}.tensor_model_parallel_size = {tp_size}: a replica lives on one node, so it must divide "
            f"trainer.n_gpus_per_node = {per_node}; set {ROLLOUT}.tensor_model_parallel_size="
            f"{_nearest(tp_size, divisors(per_node))}"
        )
    elif rollout.num_replicas is not None and rollout.num_replicas * tp_size > world:
        yield (
            f"{ROLLOUT}.num_replicas = {rollout.num_replicas}: x {ROLLOUT}.tensor_model_parallel_size = {tp_size} "
            f"must be at most the {world} devices; set {ROLLOUT}.num_replicas={world // tp_size} or less, or null"
        )


REPLICAS_ON_CUDA = Rule(
    (
        f"{ROLLOUT}.tensor_model_parallel_size",
        f"{ROLLOUT}.num_replicas",
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
    ),
    _replicas_on_cuda,
)
_PPO_WORLD = _world_rule(f"{ACTOR}.megatron")
PPO_RULES = [
    Rule((), _hybrid),
    _PPO_WORLD,
    Rule(("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"), _mini_batches),
    Rule((f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n", *_PPO_WORLD.keys), _mini_batch_feeds_ranks),
    Rule(
        (
            "data.max_prompt_length",
            "data.max_response_length",
            f"{ACTOR}.ppo_max_token_len_per_gpu",
            *aligning_keys(f"{ACTOR}.megatron"),
        ),
        _token_budget,
    ),
    *_lr_rules(f"{ACTOR}.optim"),
    *_megatron_rules(f"{ACTOR}.megatron"),
    Rule((f"{ROLLOUT}.n", "algorithm.adv_estimator"), _group_baseline),
    Rule((f"{ROLLOUT}.val_kwargs.n",), _greedy_repeats),
    Rule(("actor_rollout_ref.ref.model_path",), _reference_used),
    *_role_rules("ref", "actor_rollout_ref.ref", "log_prob_max_token_len_per_gpu"),
    *_megatron_rules("actor_rollout_ref.ref.megatron", unless=f"{ACTOR}.megatron"),
    *_role_rules("critic", "critic", "ppo_max_token_len_per_gpu"),
    *_megatron_rules("critic.megatron", unless=f"{ACTOR}.megatron"),
    *_lr_rules("critic.optim"),
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
    *_role_rules("reward_model", "reward_model", "forward_max_token_len_per_gpu"),
    *_megatron_rules("reward_model.megatron", unless=f"{ACTOR}.megatron"),
    Rule(("reward_model.model.path",), _reward_model_given),
    RESUME,
]


# Rules of SFT


def _batch_feeds_ranks(cfg: SFTConfig) -> Iterator[str]:
    needed, what = _fewest_samples(cfg)
    if cfg.data.train_batch_size < needed:
        yield (
            f"data.train_batch_size = {cfg.data.train_batch_size}: must be at least the {what}; set "
            f"data.train_batch_size={needed} or more, or train on fewer devices"
        )


def _sft_token_budget(cfg: SFTConfig) -> Iterator[str]:
    budget, longest = cfg.data.max_token_len_per_gpu, cfg.data.max_length
    needed = tokens_per_device(longest, cfg.megatron)
    if budget < needed:
        yield (
            f"data.max_token_len_per_gpu = {budget}: must hold the longest conversation, data.max_length = {longest}; "
            f"set data.max_token_len_per_gpu={needed} or more"
        )


def _sft_validation(cfg: SFTConfig) -> Iterator[str]:
    if cfg.trainer.test_freq != -1 and cfg.data.val_files is None:
        yield (
            f"trainer.test_freq = {cfg.trainer.test_freq}: there is nothing to validate on while data.val_files = "
            "null; set data.val_files, or trainer.test_freq=-1"
        )


_SFT_WORLD = _world_rule("megatron")
SFT_RULES = [
    _SFT_WORLD,
    Rule(("data.train_batch_size", *_SFT_WORLD.keys), _batch_feeds_ranks),
    Rule(("data.max_length", "data.max_token_len_per_gpu", *aligning_keys("megatron")), _sft_token_budget),
    Rule(("trainer.test_freq", "data.val_files"), _sft_validation),
    *_lr_rules("optim"),
    *_megatron_rules("megatron"),
    RESUME,
]
