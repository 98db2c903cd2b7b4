"""Groups of samples: `SampleGroup` of one prompt in one step, which groups can teach, and how many are enough.

A rollout worker scores samples as they finish (`GroupScores`), and counts the kept groups of all workers
(`EarlyEndCount`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from scalerl.rewards import ScoreResult
    from scalerl.rollout.program import Sample, Trajectory

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
    """Keeps groups whose samples differ in a metric: those of one agent, where agents have names.

    metric: SCORE, which is before penalties, or a number that the reward function returns beside it.
    """

    metric: str

    def keeps(
        self,
        scores: Sequence[float] | np.ndarray,
        extras: Sequence[Mapping[str, Any]] | np.ndarray,
        failed: Sequence[bool] | np.ndarray,
        agents: Sequence[str] | np.ndarray | None = None,
    ) -> bool:
        """Whether the samples of a group that have a score differ: where they do not, every advantage is 0.

        Raises ValueError when one of them has no such number.
        """
        values: dict[str, list[float]] = {}
        for row, is_failed in enumerate(failed):
            if not is_failed:
                value = scores[row] if self.metric == SCORE else self._of(extras[row])
                values.setdefault("" if agents is None else agents[row], []).append(value)
        return any(max(of_agent) > min(of_agent) for of_agent in values.values())

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
    columns = [samples[name] for name in ("score", "reward_extra", "reward_failed", "agent") if name in samples]
    return [uid for uid, mine in rows.items() if keep.keeps(*(column[mine] for column in columns))]


class GroupScores:
    """The scores of one generation with n samples per group."""

    def __init__(
        self, n: int, score: Callable[[Sample], Coroutine[Any, Any, list[ScoreResult]]], enough: EarlyEnd | None
    ) -> None:
        """Begins without a sample.  score: the results of a sample, one for each trajectory."""
        self.n, self.score, self.enough = n, score, enough
        self.samples: dict[int, list[Sample]] = {}
        self.tasks: dict[tuple[int, int], asyncio.Task[list[ScoreResult]]] = {}
        self.kept: set[int] = set()
        # uid of a group -> how many of its scores are there, or failed.
        self.num_scored: dict[int, int] = {}
        # Groups with all scores that are not known to be kept or dropped yet.
        self.unjudged: set[int] = set()

    def add(self, sample: Sample) -> None:
        """Starts to score a finished sample."""
        self.samples.setdefault(sample.uid, []).append(sample)
        task = self.tasks[sample.uid, sample.sample_index] = asyncio.ensure_future(self.score(sample))
        task.add_done_callback(lambda _: self._note_scored(sample.uid))

    def _note_scored(self, uid: int) -> None:
        """Counts a score of a group, so that `are_enough` looks at a group when its last one is there, and once."""
        self.num_scored[uid] = self.num_scored.get(uid, 0) + 1
        if self.num_scored[uid] == self.n:
            self.unjudged.add(uid)

    def is_finished(self, uid: int) -> bool:
        return len(self.samples.get(uid, ())) == self.n

    def finished(self, uid: int) -> list[Sample]:
        """The group's finished samples."""
        return self.samples.get(uid, [])

    async def of(self, uid: int) -> list[tuple[Trajectory, ScoreResult]]:
        """The trajectories of a finished group with their scores, by sample index. Raises what scoring raised."""
        samples = sorted(self.samples[uid], key=lambda sample: sample.sample_index)
        results = [await self.tasks[uid, sample.sample_index] for sample in samples]
        return [
            row
            for sample, scored in zip(samples, results, strict=True)
            for row in zip(sample.trajectories, scored, strict=True)
        ]

    def are_enough(self) -> bool:
        """Whether enough groups are kept, or scoring failed: the generation is over then too, and `of` says why."""
        assert self.enough is not None
        for uid in list(self.unjudged):
            tasks = [self.tasks[uid, sample.sample_index] for sample in self.samples[uid]]
            if any(task.cancelled() or task.exception() for task in tasks):
                return True
            self.unjudged.discard(uid)
            results = [result for task in tasks for result in task.result()]
            keep = self.enough.keep
            scores, extras, failed = zip(*((r.score, r.extra, r.error is not None) for r in results), strict=True)
            agents = [t.agent for sample in self.samples[uid] for t in sample.trajectories]
            if keep is None or keep.keeps(scores, extras, failed, agents):
                self.kept.add(uid)
        return len(self.kept) >= self.enough.num_groups

    def cancel(self) -> None:
        for task in self.tasks.values():
            task.cancel()


class EarlyEndCount:
    """Counts the kept groups of a generation over all rollout workers, and ends it when they are enough.

    Each worker has one, and tells that of the first worker how many groups it has kept.
    """

    def __init__(self, number: int, workers: Sequence[Any]) -> None:
        """Begins with no generation.  number: of this worker.  workers: handles of all; one alone counts itself."""
        self.number, self.workers = number, list(workers)
        # Generations that have enough groups.
        self.over: set[int] = set()
        # Generation -> number of groups that this worker has reported.
        self._told: dict[int, int] = {}
        # On the first worker: generation -> worker -> number of groups that it has reported.
        self._counted: dict[int, dict[int, int]] = {}

    def is_over(self, generation: int, scores: GroupScores) -> bool:
        """Whether a generation is over, for `Dispatcher.stop_when`. scores: of this worker's groups."""
        is_over, num_kept = scores.are_enough(), len(scores.kept)
        if len(self.workers) > 1 and self._told.get(generation, 0) < num_kept:
            assert scores.enough is not None
            self._told[generation] = num_kept
            self.workers[0].count_kept.remote(generation, self.number, num_kept, scores.enough.num_groups)
        return is_over or generation in self.over

    def forget(self, generation: int) -> None:
        """Forgets a generation that has ended."""
        self.over.discard(generation)
        self._told.pop(generation, None)

    def count(self, generation: int, worker: int, num_kept: int, num_groups: int) -> None:
        """Notes how many groups a worker has kept; ends the generation once those of all workers are enough.

        Only the first worker's is called.
        """
        counted = self._counted.setdefault(generation, {})
        counted[worker] = num_kept
        if sum(counted.values()) >= num_groups:
            for handle in self.workers:
                handle.end_early.remote(generation)
