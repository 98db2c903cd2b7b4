"""The meaning of the values of `RolloutCorrectionConfig`: which tests they name, and the bounds of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scalerl.config.names import CORRECTION

if TYPE_CHECKING:
    from scalerl.config.schema import RolloutCorrectionConfig

# Values of rollout_correction.rollout_is.
IS_LEVELS = ("token", "sequence", "geometric")
# Tests that rollout_correction.rollout_rs may name.
RS_OPTIONS = (
    *(f"token_{kind}" for kind in ("k1", "k2", "k3")),
    *(f"seq_sum_{kind}" for kind in ("k1", "k2", "k3")),
    *(f"seq_mean_{kind}" for kind in ("k1", "k2", "k3")),
    *(f"seq_max_{kind}" for kind in ("k2", "k3")),
)
# (lower or None, upper)
Bounds = tuple[float | None, float]
_IS_KEY, _RS_KEY = f"{CORRECTION}.rollout_is_threshold", f"{CORRECTION}.rollout_rs_threshold"
_BAND = 'a band is [lower, upper] or "lower_upper"'
# Thresholds that a message proposes: bounds of a ratio by test, and the largest divergence of any other test.
_USUAL_BOUNDS = {"token_k1": "[0.5,2]", "seq_sum_k1": "[0.5,2]", "seq_mean_k1": "[0.999,1.001]"}
_USUAL_DIVERGENCE = "0.01"


def corrects(config: RolloutCorrectionConfig) -> bool:
    """Whether the correction weighs tokens or masks some of them; bypass_mode does neither."""
    return config.rollout_is is not None or rejects(config)


def rejects(config: RolloutCorrectionConfig) -> bool:
    """Whether a sampled token may leave the loss."""
    return config.rollout_rs is not None or config.rollout_token_veto_threshold is not None


def is_bounds(config: RolloutCorrectionConfig) -> Bounds:
    """The bounds that rollout_is_threshold gives: (None, upper) truncates, (lower, upper) zeroes what is outside.

    Raises ValueError unless lower <= 1 <= upper: a ratio of 1 is a token on which both agree.
    """
    return _ratio_bounds(_IS_KEY, config.rollout_is_threshold)


def rs_bounds(config: RolloutCorrectionConfig) -> dict[str, Bounds]:
    """The bounds of each test of rollout_rs: k1: (lower, upper) of the ratio; k2, k3: (None, upper) of the divergence.

    Raises ValueError for thresholds that do not fit the tests.
    """
    names = config.rollout_rs or []
    tests = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    thresholds = _rs_thresholds(tests, config.rollout_rs_threshold)
    return {test: _rs_threshold(test, value) for test, value in zip(tests, thresholds, strict=True)}


def _rs_thresholds(tests: Sequence[str], value: Any) -> list[Any]:
    """The threshold of each test, as it was written."""
    if not tests:
        if value is not None:
            raise ValueError(
                f"{_RS_KEY} = {value}: there are no tests; set {CORRECTION}.rollout_rs=seq_mean_k3, or another, or "
                f"{_RS_KEY}=null"
            )
        return []
    if value is None:
        usual = [_USUAL_BOUNDS.get(test, _USUAL_DIVERGENCE) for test in tests]
        text = usual[0] if len(usual) == 1 else f"[{','.join(usual)}]"
        raise ValueError(
            f"{_RS_KEY} = null: needed by {', '.join(tests)}, one for all or one each; set {_RS_KEY}={text}, or others"
        )
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
    else:
        # A list is one test's band, or one entry per test.
        parts = list(value) if isinstance(value, Sequence) and len(tests) > 1 else [value]
    if len(parts) == 1:
        parts *= len(tests)
    if len(parts) != len(tests):
        raise ValueError(
            f"{_RS_KEY} = {value}: {len(parts)} thresholds for {len(tests)} tests; give one for all, or one each"
        )
    return parts


def _rs_threshold(test: str, value: Any) -> Bounds:
    if test.endswith("k1"):
        lower, upper = _ratio_bounds(_RS_KEY, value)
        return (1.0 / upper if lower is None else lower, upper)
    lower, upper = _numbers(_RS_KEY, value)
    if lower is not None or not upper > 0:
        raise ValueError(f"{_RS_KEY} = {value}: {test} needs one number above 0, the largest divergence")
    return None, upper


def _ratio_bounds(key: str, value: Any) -> Bounds:
    lower, upper = _numbers(key, value)
    # YAML and Hydra read 0.5_5 as the number 0.55.
    if not upper >= 1:
        raise ValueError(
            f"{key} = {value}: the upper bound of a ratio must be at least 1; {_BAND}; set for example [0.5, 5]"
        )
    if lower is not None and not 0 < lower <= 1:
        raise ValueError(f"{key} = {value}: the lower bound of a ratio must be above 0 and at most 1")
    return lower, upper


def _numbers(key: str, value: Any) -> Bounds:
    parts: Any = value.split("_") if isinstance(value, str) else value
    parts = list(parts) if isinstance(parts, Sequence) else [parts]
    try:
        numbers = [float(part) for part in parts if not isinstance(part, bool)]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != len(parts) or len(numbers) not in (1, 2) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{key} = {value}: must be a number or a band; {_BAND}; set for example [0.5, 2]")
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
