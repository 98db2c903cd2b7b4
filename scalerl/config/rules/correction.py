"""Rules of `algorithm.rollout_correction`, one for each key, so that a wrong one hides nothing about the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from scalerl.config.correction import correction_violations
from scalerl.config.rules.base import Rule, rule
from scalerl.config.schema import PPOConfig, RolloutCorrectionConfig
from scalerl.config.sections import CORRECTION


def _key_rule(key: str) -> Rule:
    @rule(key)
    def goes_with_the_others(cfg: PPOConfig) -> Iterator[str]:
        violations = correction_violations(cfg.algorithm.rollout_correction, prefix=CORRECTION)
        yield from (text for text in violations if text.startswith(f"{key} = "))

    return goes_with_the_others


CORRECTION_RULES = [_key_rule(f"{CORRECTION}.{field.name}") for field in fields(RolloutCorrectionConfig)]
