"""`Ledger` counts the groups of samples, and checks that none is lost or counted twice."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

# Why a group is not trained on. no_contrast: its samples do not differ.  surplus: more groups were finished than the
# step needs.  unfinished: the step had enough groups and did not wait.  stale: its tokens would be older than
# trainer.max_staleness allows.
DropReason = Literal["no_contrast", "surplus", "unfinished", "stale"]
DROP_REASONS: tuple[DropReason, ...] = ("no_contrast", "surplus", "unfinished", "stale")


class ConservationError(RuntimeError):
    """Raised when submitted = trained + dropped + in flight does not hold: a defect, not the user's mistake."""


class Ledger:
    """Counts of groups since the run began, over all its resumes."""

    def __init__(self) -> None:
        self.submitted = self.trained = 0
        self.dropped: Counter[str] = Counter()

    def submit(self, num_groups: int) -> None:
        """Counts groups that were requested."""
        self.submitted += num_groups

    def train(self, num_groups: int) -> None:
        """Counts groups that were trained on."""
        self.trained += num_groups

    def drop(self, reason: DropReason, num_groups: int) -> None:
        """Counts groups that were dropped for a reason."""
        self.dropped[reason] += num_groups

    @property
    def in_flight(self) -> int:
        """Groups that were submitted, and neither trained nor dropped."""
        return self.submitted - self.trained - self.dropped.total()

    def check(self, in_flight: int) -> None:
        """Raises ConservationError unless the counts give `in_flight`, the number of groups that are held somewhere."""
        if in_flight != self.in_flight:
            raise ConservationError(
                f"{self.submitted} groups submitted, {self.trained} trained, dropped {dict(self.dropped)}: "
                f"{self.in_flight} should be in flight, {in_flight} are"
            )

    def totals(self) -> dict[str, int]:
        """The counts by name: submitted, trained, in_flight, dropped/{reason}."""
        counts = {"submitted": self.submitted, "trained": self.trained, "in_flight": self.in_flight}
        return counts | {f"dropped/{reason}": self.dropped[reason] for reason in DROP_REASONS}

    def state_dict(self) -> dict[str, Any]:
        """The counts in plain JSON values."""
        return {"submitted": self.submitted, "trained": self.trained, "dropped": dict(self.dropped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the counts of `state_dict`."""
        self.submitted, self.trained = state["submitted"], state["trained"]
        self.dropped = Counter(state["dropped"])
