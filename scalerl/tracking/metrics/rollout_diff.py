"""Metrics of the difference between the trainer's and the sampler's probabilities, for any split of the tokens.

`rollout_diff_sums` is called on each data-parallel rank, `merge_metrics` merges, and `rollout_diff_metrics` is called
once on the result.  T: tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from scalerl.tracking.metrics.metric import Metric

if TYPE_CHECKING:
    from torch import Tensor

_PARTIAL = "rollout_diff_partial/"
_DIFF = "training/rollout_probs_diff"
# Below this variance of the probabilities a correlation is rounding noise.
_MIN_VARIANCE = 1e-12


def rollout_diff_sums(rollout_logprobs_T: Tensor, old_logprobs_T: Tensor, mask_T: Tensor) -> dict[str, Metric]:
    """Partial sums over one rank's sampled tokens, in float64.

    All arguments [T]; mask_T is true on sampled tokens. Both log-probs must be of the same distribution: the sampler's
    temperature, without top-p or top-k renormalization.
    """
    keep_T = mask_T.bool()
    rollout = rollout_logprobs_T[keep_T].double().exp()
    trainer = old_logprobs_T[keep_T].double().exp()
    difference = (rollout - trainer).abs()
    sums = {
        "num": float(keep_T.sum()),
        "diff": float(difference.sum()),
        "diff2": float(difference.square().sum()),
        "x": float(rollout.sum()),
        "y": float(trainer.sum()),
        "xx": float(rollout.square().sum()),
        "yy": float(trainer.square().sum()),
        "xy": float((rollout * trainer).sum()),
    }
    metrics = {_PARTIAL + name: Metric(value, "sum") for name, value in sums.items()}
    metrics[_PARTIAL + "max"] = Metric(float(difference.max()) if len(difference) else 0.0, "max")
    return metrics


def rollout_diff_metrics(metrics: Mapping[str, Metric | float]) -> dict[str, Metric | float]:
    """Replaces the merged partial sums in `metrics` by the metrics they stand for; all others are kept as they are.

    training/rollout_probs_diff_{mean,max,std}: statistics of |p_rollout - p_old| over sampled tokens (std: population).
    training/rollout_probs_diff_valid: 1 if there were tokens; else 0, and the others are absent.
    training/rollout_actor_probs_pearson_corr: correlation of p_rollout and p_old; absent when either does not vary.
    """
    parts = {key.removeprefix(_PARTIAL): metric for key, metric in metrics.items() if key.startswith(_PARTIAL)}
    rest = {key: metric for key, metric in metrics.items() if not key.startswith(_PARTIAL)}
    if not parts:
        return rest
    sums = {name: metric.value if isinstance(metric, Metric) else float(metric) for name, metric in parts.items()}
    n = sums["num"]
    if n == 0:
        return rest | {f"{_DIFF}_valid": 0.0}
    mean = sums["diff"] / n
    diff_metrics = {
        f"{_DIFF}_valid": 1.0,
        f"{_DIFF}_mean": mean,
        f"{_DIFF}_max": sums["max"],
        # Rounding can leave the difference of two equal numbers below 0; NaN stays NaN, it is the finding.
        f"{_DIFF}_std": math.sqrt(_not_below_zero(sums["diff2"] / n - mean**2)),
    }
    mean_x, mean_y = sums["x"] / n, sums["y"] / n
    var_x, var_y = sums["xx"] / n - mean_x**2, sums["yy"] / n - mean_y**2
    if var_x > _MIN_VARIANCE and var_y > _MIN_VARIANCE:
        correlation = (sums["xy"] / n - mean_x * mean_y) / math.sqrt(var_x * var_y)
        diff_metrics["training/rollout_actor_probs_pearson_corr"] = max(-1.0, min(1.0, correlation))
    return rest | diff_metrics


def _not_below_zero(value: float) -> float:
    return 0.0 if value < 0 else value
