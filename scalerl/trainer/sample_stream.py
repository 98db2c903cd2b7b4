"""`SampleStream` gives each step its groups of samples, requested up to `trainer.max_staleness` steps ahead."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalerl.cluster.batch import HeldRows
from scalerl.config import PPOConfig
from scalerl.data import PromptCursor
from scalerl.errors import UserError
from scalerl.rollout.sampling.groups import EarlyEnd, GroupFilter, SampleGroup, kept_uids
from scalerl.rollout.sampling.rollout import Finished, Generation, HybridRollout
from scalerl.tracking.metrics import Metric, merge_metrics
from scalerl.trainer.ledger import Ledger


class NoContrastError(UserError, RuntimeError):
    """Raised when a step gets no group whose samples differ."""


@dataclass(frozen=True)
class _Asked:
    """A round of generation for a step, which is running."""

    step: int
    groups: list[SampleGroup]
    generation: Generation


class SampleStream:
    """Source of sample groups: each requested group is trained on once, dropped for a reason, or in flight.

    prompts: gives the prompts of new groups.
    """

    def __init__(self, config: PPOConfig, rollout: HybridRollout, prompts: PromptCursor, *, total_steps: int) -> None:
        self.rollout, self.prompts, self.total_steps = rollout, prompts, total_steps
        self.batch_size = config.data.train_batch_size
        self.gen_batch_size = config.data.gen_batch_size
        self.max_staleness = config.trainer.max_staleness
        groups = config.algorithm.filter_groups
        self.keep = GroupFilter(groups.metric) if groups.enable else None
        self.max_rounds = groups.max_num_gen_batches if groups.enable else 1
        # Servers generate while the trainer computes only if they have their own devices.
        self.steps_ahead = 0 if config.actor_rollout_ref.hybrid_engine else self.max_staleness
        self.carries = config.actor_rollout_ref.hybrid_engine and config.actor_rollout_ref.rollout.partial_rollout
        self.ledger = Ledger()
        self.asked: deque[_Asked] = deque()
        # Unfinished groups of a step that ended early; the next step requests them first.
        self.carried: list[SampleGroup] = []
        # Step -> groups that were in flight when a checkpoint was saved; they are requested again.
        self.again: dict[int, list[SampleGroup]] = {}
        # Step -> number of groups that were made for it.
        self.num_made: Counter[int] = Counter()

    def next_batch(self, step: int) -> tuple[HeldRows, dict[str, Metric]]:
        """Returns train_batch_size groups of n samples for a step, and metrics of their generation.

        After max_num_gen_batches rounds, groups without contrast fill the batch. Raises NoContrastError when these
        rounds gave no group with contrast.
        """
        while len(self.asked) <= self.steps_ahead and (coming := step + len(self.asked)) <= max(step, self.total_steps):
            self.asked.append(self._ask(coming, self._first_groups(coming)))
        asked = self.asked.popleft()
        assert asked.step == step
        rounds = [self._finish(asked)]
        kept = [kept_uids(rounds[0].samples.samples, self.keep)]
        while (missing := self.batch_size - sum(map(len, kept))) > 0 and len(rounds) < self.max_rounds:
            more = self._new_groups(step, self._size_of_round(rounds, kept))
            rounds.append(self._finish(self._ask(step, more, missing=missing)))
            kept.append(kept_uids(rounds[-1].samples.samples, self.keep))
        num_filled = max(0, missing)
        if num_filled:
            kept = self._filled(rounds, kept, missing)
        samples = self._select(rounds, kept)
        self._check()
        metrics = merge_metrics(finished.metrics for finished in rounds)
        return samples, metrics | self._metrics(samples, step, len(rounds), num_filled)

    def trained(self) -> None:
        """Counts the batch that `next_batch` returned last as trained."""
        self.ledger.train(self.batch_size)

    # --- requests ---

    def _first_groups(self, step: int) -> list[SampleGroup]:
        groups = self.again.pop(step, [])
        if self.carried:
            fresh = [group for group in self.carried if step - group.step <= self.max_staleness]
            stale = [group for group in self.carried if step - group.step > self.max_staleness]
            self._drop("stale", stale)
            groups, self.carried = groups + fresh, []
        return groups + self._new_groups(step, max(0, self.gen_batch_size - len(groups)))

    def _new_groups(self, step: int, count: int) -> list[SampleGroup]:
        first = self.num_made[step]
        self.num_made[step] += count
        self.ledger.submit(count)
        return [SampleGroup(uid, step, first + i) for i, uid in enumerate(self.prompts.take(count))]

    def _ask(self, step: int, groups: list[SampleGroup], *, missing: int | None = None) -> _Asked:
        # Without oversampling all groups are used, in the order of the prompts: taking those that finish first would
        # prefer short responses.
        oversampled = self.gen_batch_size > self.batch_size
        enough = EarlyEnd(missing or self.batch_size, self.keep) if oversampled else None
        return _Asked(step, groups, self.rollout.begin(groups, enough=enough, carry=self.carries))

    def _size_of_round(self, rounds: Sequence[Finished], kept: Sequence[Sequence[int]]) -> int:
        """The number of groups to request so that enough are kept, at the rate of the rounds before."""
        num_kept, tried = sum(map(len, kept)), sum(len(set(done.samples.samples["uid"].tolist())) for done in rounds)
        if not num_kept:
            return self.gen_batch_size
        return min(self.gen_batch_size, math.ceil((self.batch_size - num_kept) * tried / num_kept))

    # --- finished groups ---

    def _finish(self, asked: _Asked) -> Finished:
        finished = self.rollout.finish(asked.generation)
        if self.carries:
            self.carried += finished.unfinished
        else:
            self.ledger.drop("unfinished", len(finished.unfinished))
        return finished

    def _filled(self, rounds: Sequence[Finished], kept: Sequence[list[int]], missing: int) -> list[list[int]]:
        """Adds the first `missing` groups without contrast to `kept`, so that a run continues whose policy has become
        too good for its prompts. Samples of equal score have no advantage over each other; their tokens count in the
        loss's mean."""
        if not any(kept):
            raise NoContrastError(self._none_differs(len(rounds)))
        filled = []
        for finished, uids in zip(rounds, kept, strict=True):
            chosen = set(uids)
            others = [uid for uid in dict.fromkeys(finished.samples.samples["uid"].tolist()) if uid not in chosen]
            filled.append([*uids, *others[:missing]])
            missing -= len(others[:missing])
        return filled

    def _select(self, rounds: Sequence[Finished], kept: Sequence[list[int]]) -> HeldRows:
        """Selects the rows of the first batch_size groups that were kept, and counts the others as dropped."""
        batches, room = [], self.batch_size
        for finished, uids in zip(rounds, kept, strict=True):
            samples = finished.samples
            wanted = uids[:room]
            room -= len(wanted)
            num_groups = len(set(samples.samples["uid"].tolist()))
            self.ledger.drop("no_contrast", num_groups - len(uids))
            self.ledger.drop("surplus", len(uids) - len(wanted))
            batches.append((samples, np.flatnonzero(np.isin(samples.samples["uid"], wanted)).tolist()))
        if len(batches) == 1 and len(batches[0][1]) == len(batches[0][0]):
            return batches[0][0]
        return self.rollout.join(batches)

    def _drop(self, reason: Any, groups: Sequence[SampleGroup]) -> None:
        self.ledger.drop(reason, len(groups))
        if groups:
            self.rollout.forget(groups)

    def _check(self) -> None:
        """Checks the ledger while a batch is about to be trained on."""
        self.ledger.check(self.batch_size + self._num_waiting())

    def _num_waiting(self) -> int:
        return sum(len(asked.groups) for asked in self.asked) + len(self.carried) + sum(map(len, self.again.values()))

    def _metrics(self, samples: HeldRows, step: int, num_rounds: int, num_filled: int) -> dict[str, Metric]:
        # The policy that trains on these samples has learned from all earlier steps.
        staleness = step - 1 - samples.samples["policy_version"]
        metrics = {
            "training/staleness/mean": Metric(float(staleness.mean()), "mean"),
            "training/staleness/max": Metric(float(staleness.max()), "max"),
            "training/gen_rounds": Metric(float(num_rounds), "max"),
            "training/filled_groups": Metric(float(num_filled), "max"),
        }
        totals = {
            f"training/groups/{name}": Metric(float(count), "max") for name, count in self.ledger.totals().items()
        }
        return metrics | totals

    def _none_differs(self, num_rounds: int) -> str:
        assert self.keep is not None
        return (
            f"after {num_rounds} rounds (algorithm.filter_groups.max_num_gen_batches) of up to {self.gen_batch_size} "
            f"prompts no group has samples that differ in {self.keep.metric}: there is nothing to learn. The prompts "
            "are too easy or too hard for this policy, or the reward function gives everything the same: change the "
            "data, raise max_num_gen_batches, or set algorithm.filter_groups.enable=false"
        )

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """The state in plain JSON values. Groups in flight are requested again after a resume, from their prompts."""
        self.ledger.check(self._num_waiting())
        in_flight = {str(asked.step): [group.as_list() for group in asked.groups] for asked in self.asked}
        in_flight |= {str(step): [group.as_list() for group in groups] for step, groups in self.again.items()}
        return {
            "ledger": self.ledger.state_dict(),
            "in_flight": in_flight,
            "carried": [group.as_list() for group in self.carried],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state of `state_dict`."""
        self.ledger.load_state_dict(state["ledger"])
        in_flight = state["in_flight"]
        self.again = {int(step): [SampleGroup(*group) for group in groups] for step, groups in in_flight.items()}
        self.carried = [SampleGroup(*group) for group in state["carried"]]
        for step, groups in self.again.items():
            self.num_made[step] = len(groups)
