"""`SampleGroup`: the samples of one prompt in one step; `GroupFilter`: which groups can teach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Positions of groups in a step are below this.
_POSITIONS = 2**32


@dataclass(frozen=True)
class SampleGroup:
    """The request for one group; its fields decide what its samples draw, on any number of servers.

    prompt_uid: row of the data set.  step: the step that first asked for it.  position: in the groups of that step.
    """

    prompt_uid: int
    step: int
    position: int

    @property
    def uid(self) -> int:
        """The number of the group, unique in a run."""
        return self.step * _POSITIONS + self.position

    @staticmethod
    def step_and_position(uid: int) -> tuple[int, int]:
        return divmod(uid, _POSITIONS)

    def as_list(self) -> list[int]:
        """The group as a list for a checkpoint; `SampleGroup(*list)` is the group again."""
        return [self.prompt_uid, self.step, self.position]


@dataclass(frozen=True)
class GroupFilter:
    """Keeps groups whose samples differ in a metric.  metric: score, or a number that the reward function returns."""

    metric: str

    def keeps(self, scores: Sequence[float] | np.ndarray, extras: Sequence[Mapping[str, Any]] | np.ndarray) -> bool:
        """Whether the samples of a group differ: where they do not, every advantage is 0.

        Raises ValueError when a sample has no such number.
        """
        values = list(scores) if self.metric == "score" else [self._of(extra) for extra in extras]
        return max(values) > min(values)

    def _of(self, extra: Mapping[str, Any]) -> float:
        value = extra.get(self.metric)
        if not isinstance(value, bool | int | float):
            raise ValueError(
                f"algorithm.filter_groups.metric = {self.metric}: the reward function returned {value!r} for it; it "
                f"must be a number of every sample. It returned {sorted(extra)} beside score"
            )
        return float(value)


@dataclass(frozen=True)
class EarlyEnd:
    """When a generation may end early: as soon as this many groups are finished, scored and kept."""

    num_groups: int
    keep: GroupFilter | None = None


def kept_uids(samples: Mapping[str, np.ndarray], keep: GroupFilter | None) -> list[int]:
    """uids of the groups that `keep` keeps, in the order of their first samples. samples: column -> [S]."""
    if keep is None:
        return list(dict.fromkeys(samples["uid"].tolist()))
    rows: dict[int, list[int]] = {}
    for row, uid in enumerate(samples["uid"].tolist()):
        rows.setdefault(uid, []).append(row)
    scores, extras = samples["score"], samples["reward_extra"]
    return [uid for uid, group_rows in rows.items() if keep.keeps(scores[group_rows], extras[group_rows])]
