"""`Metric`, a value that states how it is reduced over ranks and micro-batches, and its reductions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Reduction = Literal["mean", "sum", "max", "min"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


@dataclass(frozen=True)
class Metric:
    """One rank's or micro-batch's part of a metric.

    weight: weight of `value` in a mean, e.g. the number of tokens it is the mean of; other reductions ignore it.
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


# Key -> metric.
Metrics = dict[str, Metric]


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merges the parts of each key into one metric; a part may lack any key.

    mean: weighted, and the weights add up; a part of weight 0 does not count, and with no other part the mean is NaN.
    Raises ValueError naming the key for parts that disagree on its reduction.
    """
    parts_by_key: dict[str, list[Metric]] = {}
    for part in parts:
        for key, metric in part.items():
            parts_by_key.setdefault(key, []).append(metric)
    return {key: _merge(key, metrics) for key, metrics in parts_by_key.items()}


def _merge(key: str, metrics: list[Metric]) -> Metric:
    reductions = sorted({metric.reduction for metric in metrics})
    if len(reductions) > 1:
        raise ValueError(f"metric {key!r} has different reductions in different places: {', '.join(reductions)}")
    reduction = metrics[0].reduction
    weight = math.fsum(metric.weight for metric in metrics)
    values = [float(metric.value) for metric in metrics]
    if reduction == "mean":
        counted = [(float(metric.value), metric.weight) for metric in metrics if metric.weight]
        # Equal values stay exactly as they are: sum(w * v) / sum(w) might round.
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
        # fsum raises for opposite infinities and beyond the largest float, where the sums are NaN and infinity.
        return float(sum(values))


def to_floats(metrics: Mapping[str, Metric | float]) -> dict[str, float]:
    """Each metric's value as a float, under the same key; nothing is reduced."""
    return {key: float(m.value if isinstance(m, Metric) else m) for key, m in metrics.items()}
