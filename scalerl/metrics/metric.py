"""`Metric`: a value that carries how it is reduced, and the reductions of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Reduction = Literal["mean", "sum", "max", "min"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


@dataclass(frozen=True)
class Metric:
    """One rank's (or micro-batch's) share of a metric.

    weight: how much `value` counts in a weighted mean, e.g. the tokens it is the mean of; other reductions ignore it.
    Raises ValueError for an unknown reduction and for a weight that is negative or not finite.
    """

    value: float
    reduction: Reduction
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"Metric reduction {self.reduction!r}: use one of {', '.join(REDUCTIONS)}")
        if not (self.weight >= 0 and math.isfinite(self.weight)):
            raise ValueError(f"Metric weight {self.weight}: must be finite and at least 0")


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """One metric per key, of all the parts that have the key; a part may lack any key.

    mean: weighted, the weights add up; a mean of weight 0 counts nothing, and is NaN when all are 0.
    Raises ValueError naming the key for parts that disagree on its reduction.
    """
    found: dict[str, list[Metric]] = {}
    for part in parts:
        for key, metric in part.items():
            found.setdefault(key, []).append(metric)
    return {key: _merge(key, metrics) for key, metrics in found.items()}


def _merge(key: str, metrics: list[Metric]) -> Metric:
    reductions = sorted({metric.reduction for metric in metrics})
    if len(reductions) > 1:
        raise ValueError(f"metric {key!r} has different reductions in different places: {', '.join(reductions)}")
    reduction = metrics[0].reduction
    weight = math.fsum(metric.weight for metric in metrics)
    values = [float(metric.value) for metric in metrics]
    if reduction == "mean":
        counted = [(float(metric.value), metric.weight) for metric in metrics if metric.weight]
        # A common finite value stays exactly itself: sum(w * v) / sum(w) may round it away.
        if len({value for value, _ in counted}) == 1:
            return Metric(counted[0][0], reduction, weight)
        return Metric(_total([v * w for v, w in counted]) / weight if counted else math.nan, reduction, weight)
    if any(math.isnan(value) for value in values):
        return Metric(math.nan, reduction, weight)
    reduce = {"sum": _total, "max": max, "min": min}[reduction]
    return Metric(reduce(values), reduction, weight)


def _total(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        # fsum raises for opposite infinities and beyond the largest float: NaN and infinity are what they add up to.
        return float(sum(values))


def to_floats(metrics: Mapping[str, Metric | float]) -> dict[str, float]:
    """The values alone."""
    return {key: float(m.value if isinstance(m, Metric) else m) for key, m in metrics.items()}
