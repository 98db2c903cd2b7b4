"""Checks a configuration by itself: values outside their domain, and check methods between keys."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from scalerl.config.keys import default_sources, inherited_keys
from scalerl.config.schema import PPOConfig, SFTConfig, domain_violations
from scalerl.config.schema.fields import Place, broken_checks


def violations_of(cfg: Any, *, device: str | None = None, wrong: Iterable[str] = ()) -> list[str]:
    """Lists everything that is wrong with the configuration of a command by itself.

    Args:
        device: cuda or cpu once it is known; None takes trainer.device, where auto skips the checks of one device.
        wrong: keys and sections that have a violation already; "" stands for all keys. A check between such a key and
            others is left out.
    Returns: "key = value: limit; what to set" for each violation; empty when there is none.
    """
    outside = dict(domain_violations(cfg))
    is_here = device is not None
    if device is None and isinstance(cfg, PPOConfig | SFTConfig) and cfg.trainer.device in ("cuda", "cpu"):
        device = cfg.trainer.device
    at = Place("", device, is_here, _with_followers(type(cfg), {*wrong, *outside}))
    without = cfg.sections_without_checks() if isinstance(cfg, PPOConfig) else ()
    broken = (text for text in broken_checks(cfg, at, without) if text.split(" = ")[0] not in outside)
    return [*without_repeats(cfg, outside), *broken]


def validate_ppo(cfg: PPOConfig, *, device: str | None = None) -> list[str]:
    """Lists what is wrong with a configuration of `scalerl train`.  device: as that of `violations_of`."""
    return violations_of(cfg, device=device)


def validate_sft(cfg: SFTConfig, *, device: str | None = None) -> list[str]:
    """Lists what is wrong with a configuration of `scalerl sft`.  device: as that of `violations_of`."""
    return violations_of(cfg, device=device)


def _with_followers(schema: type, wrong: set[str]) -> frozenset[str]:
    """Adds the keys whose default follows from a wrong key."""
    followers = default_sources(schema)
    while new := {key for key, sources in followers.items() if key not in wrong and not wrong.isdisjoint(sources)}:
        wrong |= new
    return frozenset(wrong)


def without_repeats(cfg: Any, outside: dict[str, str]) -> list[str]:
    """The violations, without those of keys that inherit their value from another key with a violation."""
    sources = inherited_keys(type(cfg))

    def repeats(key: str) -> bool:
        return sources.get(key) in outside and value_at(cfg, key) == value_at(cfg, sources[key])

    return [text for key, text in outside.items() if not repeats(key)]


def value_at(cfg: Any, key: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(getattr, key.split("."), cfg)
