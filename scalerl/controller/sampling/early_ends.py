"""`EarlyEnds`: when a generation that several rollout workers share has enough groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalerl.controller.sampling.scoring import GroupScores


class EarlyEnds:
    """Of one worker. Each tells the first how many groups it has; the first tells all when these are enough."""

    def __init__(self, number: int, workers: Sequence[Any]) -> None:
        """number: of this worker.  workers: handles of all; one or none: it is alone."""
        self.number, self.workers = number, list(workers)
        # Generations that have enough groups.
        self.over: set[int] = set()
        # Of this worker: generation -> groups that it has told of.
        self._told: dict[int, int] = {}
        # Of the first worker: generation -> worker -> groups.
        self._counted: dict[int, dict[int, int]] = {}

    def is_over(self, generation: int, scores: GroupScores) -> bool:
        """`Dispatcher.stop_when`. scores: of this worker's groups."""
        is_over, num_kept = scores.are_enough(), len(scores.kept)
        if len(self.workers) > 1 and self._told.get(generation, 0) < num_kept:
            assert scores.enough is not None
            self._told[generation] = num_kept
            self.workers[0].count_kept.remote(generation, self.number, num_kept, scores.enough.num_groups)
        return is_over or generation in self.over

    def forget(self, generation: int) -> None:
        """It has ended."""
        self.over.discard(generation)
        self._told.pop(generation, None)

    def count(self, generation: int, worker: int, num_kept: int, num_groups: int) -> None:
        """Of the first worker."""
        counted = self._counted.setdefault(generation, {})
        counted[worker] = num_kept
        if sum(counted.values()) >= num_groups:
            for handle in self.workers:
                handle.end_early.remote(generation)
