"""Statistics over the tokens of a mask, the same for any split of the tokens over ranks.

Each data-parallel rank calls `token_stat_sums` and `explained_variance_sums`, `merge_metrics` merges, and
`explained_variance_metrics` is called once on the result.  T: tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from scalerl.tracking.metrics.metric import Metric

if TYPE_CHECKING:
    from torch import Tensor

_PARTIAL = "vf_explained_var_partial/"
_EXPLAINED_VAR = "critic/vf_explained_var"
_EPS = 1e-5
# Below this share of the mean square a variance is rounding noise.
_MIN_VARIANCE_FRAC = 1e-14


def token_stat_sums(name: str, values_T: Tensor, mask_T: Tensor) -> dict[str, Metric]:
    """The metrics {name}/mean (weighted by tokens), max and min over the tokens of the mask; none without tokens.

    values_T: [T] float.  mask_T: [T] bool or 0/1. The result of `merge_metrics` is final.
    """
    values = values_T.detach()[mask_T.bool()].double()
    if len(values) == 0:
        return {}
    return {
        f"{name}/mean": Metric(float(values.mean()), "mean", float(len(values))),
        f"{name}/max": Metric(float(values.max()), "max"),
        f"{name}/min": Metric(float(values.min()), "min"),
    }


def explained_variance_sums(values_T: Tensor, returns_T: Tensor, mask_T: Tensor) -> dict[str, Metric]:
    """Partial sums over one rank's tokens of the mask, in float64.

    values_T, returns_T: [T].  mask_T: [T] bool or 0/1.
    """
    keep_T = mask_T.bool()
    returns = returns_T.detach()[keep_T].double()
    errors = returns - values_T.detach()[keep_T].double()
    sums = {
        "num": float(len(returns)),
        "returns": float(returns.sum()),
        "returns2": float(returns.square().sum()),
        "errors": float(errors.sum()),
        "errors2": float(errors.square().sum()),
    }
    return {_PARTIAL + name: Metric(value, "sum") for name, value in sums.items()}


def explained_variance_metrics(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Replaces the merged partial sums in `metrics` by the metric they stand for; all others are kept as they are.

    critic/vf_explained_var: 1 - var(returns - values) / (var(returns) + 1e-5), with unbiased variances. 1: the values
    are right up to a constant; 0: they are no better than a constant. Absent with fewer than two tokens; NaN if a
    return or value was not finite.
    """
    parts = {key.removeprefix(_PARTIAL): metric for key, metric in metrics.items() if key.startswith(_PARTIAL)}
    rest = {key: metric for key, metric in metrics.items() if not key.startswith(_PARTIAL)}
    sums = {name: metric.value for name, metric in parts.items()}
    if not sums or sums["num"] < 2:
        return rest
    var_returns, var_errors = (_variance(sums["num"], sums[name], sums[name + "2"]) for name in ("returns", "errors"))
    return rest | {_EXPLAINED_VAR: Metric(1.0 - var_errors / (var_returns + _EPS), "mean")}


def _variance(num: float, total: float, total_of_squares: float) -> float:
    if not math.isfinite(total_of_squares):
        return math.nan
    scatter = total_of_squares - total * total / num
    return 0.0 if scatter < _MIN_VARIANCE_FRAC * total_of_squares else scatter / (num - 1)
