"""Reduction of plain lists by the names of their keys. A run's metrics are `Metric`s, which say how they reduce."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from scalerl.metrics import Metric, merge_metrics


def reduce_metrics(metrics: Mapping[str, list[Any]]) -> dict[str, Any]:
    """One number per list: of a key that contains "max" the largest, else with "min" the smallest, else the mean.

    A list of `Metric` is reduced as they say, which a name needs that contains one of the words and means something
    else (minmax_diff, admin).  Returns a new dict.
    Raises ValueError naming the key for an empty list, and for one that mixes Metric with numbers.
    """
    return {key: _reduce(key, values) for key, values in metrics.items()}


def _reduce(key: str, values: Any) -> float:
    values = list(values) if isinstance(values, list | tuple | np.ndarray) else [values]
    if not values:
        raise ValueError(f"reduce_metrics: {key!r} has an empty list; append a value or leave the key out")
    carriers = [value for value in values if isinstance(value, Metric)]
    if len(carriers) == len(values):
        return merge_metrics({key: carrier} for carrier in carriers)[key].value
    if carriers:
        raise ValueError(f"reduce_metrics: {key!r} mixes Metric with plain numbers; use one of them")
    reduce = np.max if "max" in key else np.min if "min" in key else np.mean
    return float(reduce(values))
