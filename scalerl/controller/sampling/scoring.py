"""`GroupScores`: samples are scored as they finish, and a generation learns when it has enough groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalerl.controller.sampling.groups import Enough
    from scalerl.rewards import ScoreResult
    from scalerl.servers.client import GenerateOutput


def uid_of(output: GenerateOutput) -> int:
    """Of the group that the sample is of: the rollout worker names its requests so."""
    assert isinstance(output.request_id, int), output.request_id
    return output.request_id


class GroupScores:
    """Of one generation, n samples a group."""

    def __init__(
        self, n: int, score: Callable[[GenerateOutput], Coroutine[Any, Any, ScoreResult]], enough: Enough | None
    ) -> None:
        self.n, self.score, self.enough = n, score, enough
        self.outputs: dict[int, list[GenerateOutput]] = {}
        self.tasks: dict[tuple[int, int], asyncio.Task[ScoreResult]] = {}
        self.kept: set[int] = set()
        # Finished groups that nobody has judged yet.
        self.unjudged: set[int] = set()

    def add(self, output: GenerateOutput) -> None:
        """Starts to score a sample that is finished."""
        if not output.finished:
            return
        uid = uid_of(output)
        self.outputs.setdefault(uid, []).append(output)
        self.tasks[uid, output.sample_index] = asyncio.ensure_future(self.score(output))
        if self.is_finished(uid):
            self.unjudged.add(uid)

    def is_finished(self, uid: int) -> bool:
        return len(self.outputs.get(uid, ())) == self.n

    def finished(self, uid: int) -> list[GenerateOutput]:
        """The group's finished samples."""
        return self.outputs.get(uid, [])

    async def of(self, uid: int) -> list[tuple[GenerateOutput, ScoreResult]]:
        """A finished group's, by sample index. Raises what scoring raised."""
        outputs = sorted(self.outputs[uid], key=lambda output: output.sample_index)
        return [(output, await self.tasks[uid, output.sample_index]) for output in outputs]

    def are_enough(self) -> bool:
        """Also when a sample's scoring failed: then the generation is over, too, and `of` says why."""
        assert self.enough is not None
        for uid in list(self.unjudged):
            tasks = [self.tasks[uid, output.sample_index] for output in self.outputs[uid]]
            if not all(task.done() for task in tasks):
                continue
            if any(task.cancelled() or task.exception() for task in tasks):
                return True
            self.unjudged.discard(uid)
            results = [task.result() for task in tasks]
            keep = self.enough.keep
            if keep is None or keep.keeps([result.score for result in results], [result.extra for result in results]):
                self.kept.add(uid)
        return len(self.kept) >= self.enough.num_groups

    def cancel(self) -> None:
        for task in self.tasks.values():
            task.cancel()
