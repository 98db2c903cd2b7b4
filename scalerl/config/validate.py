"""Checks a configuration by itself: values outside their domain, and broken rules between keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scalerl.config.keys import inherited_keys
from scalerl.config.reads import recording_reads
from scalerl.config.rules.base import Rule, value_at
from scalerl.config.rules.commands import PPO_RULES, SFT_RULES, device_rules
from scalerl.config.rules.generation import GENERATION_RULES
from scalerl.config.rules.names import NAME_RULES
from scalerl.config.rules.trainer import LOGGER_RULES
from scalerl.config.schema import (
    EvalConfig,
    GenerationConfig,
    LaunchConfig,
    PPOConfig,
    SFTConfig,
    domain_violations,
)


def validate_ppo(cfg: PPOConfig, *, device: str | None = None) -> list[str]:
    """Lists everything that is wrong with a configuration of `scalerl train` by itself.

    Args:
        device: cuda or cpu once it is known; None takes trainer.device, where auto skips the rules of one device.
    Returns: "key = value: limit; what to set" for each violation; empty when there is none.
    """
    return _validate(cfg, PPO_RULES, device)


def validate_sft(cfg: SFTConfig, *, device: str | None = None) -> list[str]:
    """Lists what is wrong with a configuration of `scalerl sft`, as `validate_ppo` does."""
    return _validate(cfg, SFT_RULES, device)


def validate_generation(cfg: GenerationConfig) -> list[str]:
    """Lists what is wrong with a configuration of `scalerl generate`, whose rules are the same on every device."""
    return _validate(cfg, GENERATION_RULES)


def validate_eval(cfg: EvalConfig) -> list[str]:
    """Lists what is wrong with a configuration of `scalerl eval`, which has no device and no rules between keys."""
    return _validate(cfg, [])


def validate_launch(cfg: LaunchConfig) -> list[str]:
    """Lists what is wrong with the keys of `scalerl launch slurm`; `extras.slurm` checks them against the run."""
    return _validate(cfg, [])


def validate_names(cfg: Any) -> list[str]:
    """Lists the names in a configuration of any command that nobody registered, if files of the user's own cannot."""
    rules = {PPOConfig: NAME_RULES + LOGGER_RULES, SFTConfig: LOGGER_RULES}.get(type(cfg), [])
    outside = dict(domain_violations(cfg))
    return [text for rule in rules if outside.keys().isdisjoint(rule.keys) for text in rule.check(cfg)]


def validate_except(cfg: Any, is_doubtful: Callable[[str], bool]) -> list[str]:
    """Lists what is wrong with a configuration of any command whatever the values of some of its keys are.

    is_doubtful: whether the value of a key may be another than the user meant. What depends on such a key is left out.
    """
    rules = {PPOConfig: PPO_RULES, SFTConfig: SFT_RULES, GenerationConfig: GENERATION_RULES}.get(type(cfg), [])
    outside = dict(domain_violations(cfg))
    violations = without_repeats(cfg, outside)
    if not is_doubtful("trainer.device"):
        rules = [*rules, *([] if "trainer.device" in outside else device_rules(cfg, None))]
    for rule in rules:
        reads: set[str] = set()
        broken = list(rule.check(recording_reads(cfg, reads))) if outside.keys().isdisjoint(rule.keys) else []
        if not any(map(is_doubtful, reads)):
            violations += broken
    # A name is right or wrong by itself.
    return list(dict.fromkeys([*violations, *validate_names(cfg)]))


def _validate(cfg: Any, rules: list[Rule], device: str | None = None) -> list[str]:
    outside = dict(domain_violations(cfg))
    violations = without_repeats(cfg, outside)
    rules_of_device = [] if "trainer.device" in outside else device_rules(cfg, device)
    for rule in [*rules, *rules_of_device]:
        if outside.keys().isdisjoint(rule.keys):
            violations += rule.check(cfg)
    return violations


def without_repeats(cfg: Any, outside: dict[str, str]) -> list[str]:
    """The violations, without those of keys that inherit their value from another key with a violation."""
    sources = inherited_keys(type(cfg))

    def repeats(key: str) -> bool:
        return sources.get(key) in outside and value_at(cfg, key) == value_at(cfg, sources[key])

    return [text for key, text in outside.items() if not repeats(key)]
