"""Reward rules by data source: what scores a sample when no custom function is configured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scalerl.rewards import gsm8k
from scalerl.rewards.errors import RewardError

# (solution_str, ground_truth, extra_info) -> score, or a dict with "score".
RewardRule = Callable[[str, Any, dict[str, Any] | None], float | dict[str, Any]]

_RULES: dict[str, RewardRule] = {}


def register_reward(data_source: str) -> Callable[[RewardRule], RewardRule]:
    """Decorator: fn(solution_str, ground_truth, extra_info) scores the rows of `data_source`.

    Raises ValueError when the data source has another rule already.
    """

    def register(rule: RewardRule) -> RewardRule:
        if _RULES.get(data_source, rule) is not rule:
            other = _RULES[data_source].__qualname__
            raise ValueError(f"register_reward({data_source!r}): {other} is registered already; use another name")
        _RULES[data_source] = rule
        return rule

    return register


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float | dict[str, Any]:
    """The score by the rule registered for data_source. Raises RewardError when there is none."""
    rule = _RULES.get(data_source)
    if rule is None:
        raise RewardError(
            f"no reward rule for data_source {data_source!r} (known: {', '.join(sorted(_RULES))}); "
            "set custom_reward_function.path to a Python file with "
            "compute_score(data_source, solution_str, ground_truth, extra_info=None)"
        )
    return rule(solution_str, ground_truth, extra_info)


@register_reward("openai/gsm8k")
def _score_gsm8k(solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> float:
    return gsm8k.compute_score(solution_str, ground_truth)
