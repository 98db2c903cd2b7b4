"""The meaning of the values of `RolloutCorrectionConfig`, and which of them exclude each other."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

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
_SETTING = re.compile(r"\b(rollout_\w+|bypass_mode)=")
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
    return _ratio_bounds("rollout_is_threshold", config.rollout_is_threshold)


def rs_bounds(config: RolloutCorrectionConfig) -> dict[str, Bounds]:
    """The bounds of each test of rollout_rs: k1: (lower, upper) of the ratio; k2, k3: (None, upper) of the divergence.

    Raises ValueError for a test that does not exist or is named twice, and for thresholds that do not fit the tests.
    """
    options = rs_options(config)
    return dict(zip(options, _rs_thresholds(options, config.rollout_rs_threshold), strict=True))


def rs_options(config: RolloutCorrectionConfig) -> list[str]:
    """The tests that rollout_rs names. Raises ValueError for one that does not exist or is named twice."""
    names = config.rollout_rs
    if names is None:
        return []
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    if not isinstance(names, Sequence):
        raise ValueError(f"rollout_rs = {names}: must be null, or a list of some of {', '.join(RS_OPTIONS)}")
    wrong = [name for name in names if name not in RS_OPTIONS]
    if wrong or not names or len(set(names)) != len(names):
        what = f"no test {wrong[0]!r}" if wrong else "name each test once, and at least one"
        raise ValueError(f"rollout_rs = {config.rollout_rs}: {what}; use null or some of {', '.join(RS_OPTIONS)}")
    return list(names)


def correction_violations(config: RolloutCorrectionConfig, *, prefix: str) -> list[str]:
    """Everything that is wrong with `config`, as "prefix.key = value: limit; what to set"."""
    # A message names keys without the prefix; what it says to set can be pasted.
    return [f"{prefix}." + _SETTING.sub(rf"{prefix}.\1=", text) for text in _violations(config)]


def _violations(config: RolloutCorrectionConfig) -> Iterator[str]:
    if config.rollout_is is not None and config.rollout_is not in IS_LEVELS:
        yield f"rollout_is = {config.rollout_is}: must be null or one of {', '.join(IS_LEVELS)}"
    for parse in (is_bounds, rs_bounds):
        try:
            parse(config)
        except ValueError as error:
            yield str(error)
    if config.rollout_is_batch_normalize and config.rollout_is is None:
        yield "rollout_is_batch_normalize = true: there are no weights; set rollout_is=token, or leave it false"
    veto = config.rollout_token_veto_threshold
    if veto is not None and not (_is_number(veto) and 0 < veto < 1):
        yield f"rollout_token_veto_threshold = {veto}: must be null or above 0 and below 1; set for example 1e-4"
    if config.bypass_mode:
        used = {"rollout_is": config.rollout_is, "rollout_rs": config.rollout_rs, "rollout_token_veto_threshold": veto}
        for key in (key for key, value in used.items() if value is not None):
            yield (
                f"{key} = {used[key]}: bypass_mode takes the sampler's log-probs for the trainer's, so that every "
                f"ratio is 1; set {key}=null, or bypass_mode=false"
            )


def _rs_thresholds(options: Sequence[str], value: Any) -> list[Bounds]:
    key = "rollout_rs_threshold"
    if not options:
        if value is not None:
            raise ValueError(
                f"{key} = {value}: there are no tests; set rollout_rs=seq_mean_k3, or another, or {key}=null"
            )
        return []
    if value is None:
        needs = "needs a threshold" if len(options) == 1 else "need thresholds, one for all or one each"
        usual = [_USUAL_BOUNDS.get(option, _USUAL_DIVERGENCE) for option in options]
        text = usual[0] if len(usual) == 1 else f"[{','.join(usual)}]"
        raise ValueError(f"{key} = null: {', '.join(options)} {needs}; set {key}={text}, or others")
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
    else:
        # A list is one test's band, or one entry per test.
        parts = list(value) if isinstance(value, Sequence) and len(options) > 1 else [value]
    if len(parts) == 1:
        parts *= len(options)
    if len(parts) != len(options):
        raise ValueError(
            f"{key} = {value}: {len(parts)} thresholds for {len(options)} tests; give one for all, or one each"
        )
    return [_rs_threshold(key, option, part) for option, part in zip(options, parts, strict=True)]


def _rs_threshold(key: str, option: str, value: Any) -> Bounds:
    if option.endswith("k1"):
        lower, upper = _ratio_bounds(key, value)
        return (1.0 / upper if lower is None else lower, upper)
    lower, upper = _numbers(key, value)
    if lower is not None or not upper > 0:
        raise ValueError(f"{key} = {value}: {option} needs one number above 0, the largest divergence")
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
