"""`GroupScores`: samples are scored as they finish, and a generation learns when it has enough groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalerl.rewards import ScoreResult
    from scalerl.rollout.program import Trajectory
    from scalerl.rollout.sampling.groups import EarlyEnd


class GroupScores:
    """The scores of one generation with n samples per group."""

    def __init__(
        self, n: int, score: Callable[[Trajectory], Coroutine[Any, Any, ScoreResult]], enough: EarlyEnd | None
    ) -> None:
        self.n, self.score, self.enough = n, score, enough
        self.samples: dict[int, list[Trajectory]] = {}
        self.tasks: dict[tuple[int, int], asyncio.Task[ScoreResult]] = {}
        self.kept: set[int] = set()
        # uid of a group -> how many of its scores are there, or failed.
        self.num_scored: dict[int, int] = {}
        # Groups with all scores that are not known to be kept or dropped yet.
        self.unjudged: set[int] = set()

    def add(self, sample: Trajectory) -> None:
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

    def finished(self, uid: int) -> list[Trajectory]:
        """The group's finished samples."""
        return self.samples.get(uid, [])

    async def of(self, uid: int) -> list[tuple[Trajectory, ScoreResult]]:
        """The samples of a finished group with their scores, by sample index. Raises what scoring raised."""
        samples = sorted(self.samples[uid], key=lambda sample: sample.sample_index)
        return [(sample, await self.tasks[uid, sample.sample_index]) for sample in samples]

    def are_enough(self) -> bool:
        """Whether enough groups are kept, or scoring failed: the generation is over then too, and `of` says why."""
        assert self.enough is not None
        for uid in list(self.unjudged):
            tasks = [self.tasks[uid, sample.sample_index] for sample in self.samples[uid]]
            if any(task.cancelled() or task.exception() for task in tasks):
                return True
            self.unjudged.discard(uid)
            results = [task.result() for task in tasks]
            keep = self.enough.keep
            scores, extras, failed = zip(*((r.score, r.extra, r.error is not None) for r in results), strict=True)
            if keep is None or keep.keeps(scores, extras, failed):
                self.kept.add(uid)
        return len(self.kept) >= self.enough.num_groups

    def cancel(self) -> None:
        for task in self.tasks.values():
            task.cancel()
