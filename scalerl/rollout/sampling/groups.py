"""`SampleGroup`: the samples of one prompt in one step; `GroupFilter`: which groups can teach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# The metric of a filter that every sample has.
SCORE = "score"
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
    """Keeps groups whose samples differ in a metric.

    metric: SCORE, which is before penalties, or a number that the reward function returns beside it.
    """

    metric: str

    def keeps(
        self,
        scores: Sequence[float] | np.ndarray,
        extras: Sequence[Mapping[str, Any]] | np.ndarray,
        failed: Sequence[bool] | np.ndarray,
    ) -> bool:
        """Whether the samples of a group that have a score differ: where they do not, every advantage is 0.

        Raises ValueError when one of them has no such number.
        """
        scored = [row for row, is_failed in enumerate(failed) if not is_failed]
        values = [scores[row] if self.metric == SCORE else self._of(extras[row]) for row in scored]
        return bool(values) and max(values) > min(values)

    def _of(self, extra: Mapping[str, Any]) -> float:
        value = extra.get(self.metric)
        if not isinstance(value, int | float):
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
    columns = [samples[name] for name in ("score", "reward_extra", "reward_failed")]
    return [uid for uid, mine in rows.items() if keep.keeps(*(column[mine] for column in columns))]
