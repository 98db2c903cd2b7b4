"""Rules between keys, and between the keys and the model or the machine. Values by themselves: `domains.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from scalerl.config.correction import CORRECTION_RULES
from scalerl.config.keys import inherited_keys
from scalerl.config.model_specs import all_model_roles
from scalerl.config.registered_names import GROUP_ESTIMATORS, NAME_RULES
from scalerl.config.rules.algorithm import ALGORITHM_RULES
from scalerl.config.rules.attention import transformer_engine_version, transformer_engine_violations
from scalerl.config.rules.base import Rule, divisors, nearest, nearest_multiples, value_at
from scalerl.config.rules.generation import GENERATION_RULES
from scalerl.config.rules.judge import JUDGE_RULES
from scalerl.config.rules.layout import (
    ACTOR,
    ROLLOUT,
    aligning_keys,
    dp_size,
    megatron_of,
    micro_batch_multiple,
    tokens_per_device,
)
from scalerl.config.rules.role import ROLE_RULES
from scalerl.config.rules.rollout import ROLLOUT_RULES, ROLLOUT_RULES_ON_CUDA
from scalerl.config.rules.sampling import SAMPLING_RULES
from scalerl.config.rules.section import RESUME, lr_rules, megatron_rules, world_rule
from scalerl.config.rules.user_code import KNOWN_LOGGERS
from scalerl.config.schema import EvalConfig, GenerationConfig, PPOConfig, SFTConfig, domain_violations


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


def validate_generation(cfg: GenerationConfig) -> list[str]:
    """As `validate_ppo`, for `scalerl generate`, whose rules are the same on every device."""
    return _validate(cfg, GENERATION_RULES)


def validate_eval(cfg: EvalConfig) -> list[str]:
    """As `validate_ppo`, for `scalerl eval`, which needs no device and has no rules between keys."""
    return said_once(cfg, dict(domain_violations(cfg)))


def _validate(cfg: Any, rules: list[Rule], device: str | None = None) -> list[str]:
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
        return sources.get(key) in outside and value_at(cfg, key) == value_at(cfg, sources[key])

    return [text for key, text in outside.items() if not repeats(key)]


def _device_rules(cfg: Any, device: str | None, outside: dict[str, str]) -> list[Rule]:
    if "trainer.device" in outside or isinstance(cfg, GenerationConfig):
        return []
    found = []
    # What is installed counts on the machine that has the devices, which knows them.
    if device is not None or cfg.trainer.device == "cpu":
        found += _transformer_engine_rules(cfg, device or cfg.trainer.device)
    if isinstance(cfg, PPOConfig) and (device or cfg.trainer.device) == "cuda":
        found += ROLLOUT_RULES_ON_CUDA
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
                value_at(cfg, megatron).cp_comm_type,
                value_at(cfg, megatron).context_parallel_size,
                prefix=megatron,
                device=device,
                version=transformer_engine_version(),
            )

        return Rule((f"{megatron}.cp_comm_type", f"{megatron}.context_parallel_size"), check)

    return [rule(megatron) for megatron in (trained, *others)]


# Rules of PPO


def _mini_batches(cfg: PPOConfig) -> Iterator[str]:
    prompts, mini = cfg.data.train_batch_size, cfg.actor_rollout_ref.actor.ppo_mini_batch_size
    if prompts % mini:
        yield (
            f"{ACTOR}.ppo_mini_batch_size = {mini}: must divide data.train_batch_size = {prompts}; set "
            f"{ACTOR}.ppo_mini_batch_size={nearest(mini, divisors(prompts))}, or "
            f"data.train_batch_size={nearest_multiples(prompts, mini)}"
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
    if path is not None and not (cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward):
        yield (
            f"actor_rollout_ref.ref.model_path = {path}: has no effect when {ACTOR}.use_kl_loss and "
            f"algorithm.use_kl_in_reward are false; set {ACTOR}.use_kl_loss=true or algorithm.use_kl_in_reward=true, "
            "or actor_rollout_ref.ref.model_path=null"
        )


_PPO_WORLD = world_rule(f"{ACTOR}.megatron")
PPO_RULES = [
    _PPO_WORLD,
    *ROLLOUT_RULES,
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
    *lr_rules(f"{ACTOR}.optim"),
    *megatron_rules(f"{ACTOR}.megatron"),
    Rule((f"{ROLLOUT}.n", "algorithm.adv_estimator"), _group_baseline),
    Rule((f"{ROLLOUT}.val_kwargs.n",), _greedy_repeats),
    Rule(("actor_rollout_ref.ref.model_path",), _reference_used),
    *ALGORITHM_RULES,
    *ROLE_RULES,
    *JUDGE_RULES,
    *CORRECTION_RULES,
    *SAMPLING_RULES,
    RESUME,
    KNOWN_LOGGERS,
    *NAME_RULES,
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


_SFT_WORLD = world_rule("megatron")
SFT_RULES = [
    _SFT_WORLD,
    Rule(("data.train_batch_size", *_SFT_WORLD.keys), _batch_feeds_ranks),
    Rule(("data.max_length", "data.max_token_len_per_gpu", *aligning_keys("megatron")), _sft_token_budget),
    Rule(("trainer.test_freq", "data.val_files"), _sft_validation),
    *lr_rules("optim"),
    *megatron_rules("megatron"),
    RESUME,
    KNOWN_LOGGERS,
]
