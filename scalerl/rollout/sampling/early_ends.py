"""`EarlyEndCount`: tells when a generation that several rollout workers share has enough groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalerl.rollout.sampling.scoring import GroupScores


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
