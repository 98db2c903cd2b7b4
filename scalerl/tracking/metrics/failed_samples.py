"""Failed samples: no score came of them, and reward_model.on_error=zero lets the run continue. S: samples.

The rule for all that reads scores: a failed sample counts as wrong in every mean, and no sample is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Names under which a reward function returns whether the answer is correct, and the answer that it read.
CORRECT, PREDICTION = "acc", "pred"


def as_wrong(
    values_S: Sequence[float] | np.ndarray,
    data_sources_S: Sequence[str] | np.ndarray,
    failed_S: Sequence[bool] | np.ndarray,
) -> np.ndarray:
    """The values, [S] float64, with those of failed samples replaced by what counts as wrong.

    That is 0, or the lowest value of the scored samples of the same data source where it is below 0. A NaN among
    the values is ignored.
    """
    values_S = np.array(values_S, dtype=np.float64)
    for scored, failed in _rows_of_sources(data_sources_S, failed_S):
        values_S[failed] = np.fmin.reduce(values_S[scored], initial=0.0)
    return values_S


def with_wrong_extras(
    extras_S: Sequence[Mapping[str, Any]] | np.ndarray,
    data_sources_S: Sequence[str] | np.ndarray,
    failed_S: Sequence[bool] | np.ndarray,
) -> list[Mapping[str, Any]]:
    """The values beside the scores, with those that a failed sample lacks and all scored ones of its source have.

    Numbers are those of `as_wrong`; the PREDICTION is "", as of a response without an answer.
    """
    extras = list(extras_S)
    for scored, failed in _rows_of_sources(data_sources_S, failed_S):
        wrong: dict[str, Any] = {}
        for name in extras[scored[0]] if len(scored) else ():
            values = [extras[row].get(name) for row in scored]
            if name == PREDICTION and all(value is not None for value in values):
                wrong[name] = ""
            elif all(isinstance(value, int | float) for value in values):
                wrong[name] = min(0.0, *values)
        for row in failed:
            extras[row] = wrong | dict(extras[row])
    return extras


def _rows_of_sources(
    data_sources_S: Sequence[str] | np.ndarray, failed_S: Sequence[bool] | np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The rows of scored and of failed samples of each data source that has a failed one."""
    failed_S, sources_S = np.asarray(failed_S, dtype=bool), np.asarray(data_sources_S, dtype=object)
    return [
        (np.flatnonzero(~failed_S & (sources_S == source)), np.flatnonzero(failed_S & (sources_S == source)))
        for source in dict.fromkeys(sources_S[failed_S].tolist())
    ]
