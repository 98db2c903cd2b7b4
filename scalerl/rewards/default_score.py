"""Reward rules by data source, which score samples if no custom function is configured."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from scalerl.base.user_code import is_same_definition, on_forget, place_of
from scalerl.rewards import code, gsm8k, math_answer, math_dapo, multiple_choice, reasoning_gym
from scalerl.rewards.errors import RewardError

# Called with (solution_str, ground_truth, extra_info); returns a score, or a dict with "score".
RewardRule = Callable[[str, Any, dict[str, Any] | None], float | dict[str, Any]]

_RULES: dict[str, RewardRule] = {}


def register_reward(data_source: str) -> Callable[[RewardRule], RewardRule]:
    """Decorator of fn(solution_str, ground_truth, extra_info), which scores the rows of `data_source`.

    "aime*" means all names that begin so; a rule for the exact name takes precedence over patterns.

    Raises ValueError when the data source has another rule already.
    """

    def register(rule: RewardRule) -> RewardRule:
        if not is_same_definition(_RULES.get(data_source, rule), rule):
            other = place_of(_RULES[data_source])
            raise ValueError(f"register_reward({data_source!r}): {other} is registered already; use another name")
        _RULES[data_source] = rule
        on_forget(rule, lambda: _RULES.pop(data_source, None))
        return rule

    return register


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float | dict[str, Any]:
    """Scores a sample by the rule registered for data_source.  Raises RewardError when there is none."""
    rule = _rule_of(data_source)
    if rule is None:
        raise RewardError(
            f"no reward rule for data_source {data_source!r} (known: {', '.join(sorted(_RULES))}); "
            "set custom_reward_function.path to a Python file with "
            "compute_score(data_source, solution_str, ground_truth, extra_info=None)"
        )
    return rule(solution_str, ground_truth, extra_info)


def default_compute_scores(
    data_sources: list[str],
    solution_strs: list[str],
    ground_truths: list[Any],
    extra_infos: list[dict[str, Any] | None],
) -> list[float | dict[str, Any]]:
    """Scores each sample by `default_compute_score`, and raises as it does for the first that fails."""
    samples = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [default_compute_score(*sample) for sample in samples]


def _rule_of(data_source: str) -> RewardRule | None:
    if data_source in _RULES:
        return _RULES[data_source]
    return next((rule for name, rule in _RULES.items() if fnmatchcase(data_source, name)), None)


@register_reward("openai/gsm8k")
def _score_gsm8k(solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> float:
    return gsm8k.compute_score(solution_str, ground_truth)


@register_reward("lighteval/MATH")
@register_reward("DigitalLearningGmbH/MATH-lighteval")
@register_reward("HuggingFaceH4/MATH-500")
@register_reward("hiyouga/geometry3k")
def _score_math(solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> dict[str, Any]:
    return math_answer.compute_score(solution_str, ground_truth)


@register_reward("math")
@register_reward("math_dapo")
@register_reward("math_dapo_reasoning")
@register_reward("aime*")
def _score_math_dapo(solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> dict[str, Any]:
    return math_dapo.compute_score(solution_str, ground_truth)


@register_reward("multiple_choice")
def _score_multiple_choice(
    solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    return multiple_choice.compute_score(solution_str, ground_truth)


@register_reward("code")
@register_reward("codecontests")
@register_reward("apps")
@register_reward("codeforces")
@register_reward("taco")
def _score_code(solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> dict[str, Any]:
    return code.compute_score(solution_str, ground_truth)


@register_reward("reasoning_gym/*")
def _score_reasoning_gym(
    solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    return reasoning_gym.compute_score(solution_str, extra_info)
