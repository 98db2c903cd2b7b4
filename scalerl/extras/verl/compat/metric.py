"""Reduces lists of metric values by the names of their keys, as verl does.

A run of scalerl uses `Metric`s instead, each of which says how it is reduced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from scalerl.tracking.metrics import Metric, merge_metrics


def reduce_metrics(metrics: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Reduces each list to one number: by maximum if its key contains "max", else minimum if "min", else mean.

    A list of `Metric`s is reduced as they say: use them under a key that contains one of the words by chance
    (minmax_diff, admin).  Returns a new dict.
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
