"""What the controller holds of a step's batch: one row of metadata per sample and references to the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scalerl.balance import StepPlan


@dataclass(frozen=True)
class BatchRef:
    """Samples that a rollout worker made and still holds. samples: column name -> [S]."""

    batch_id: int
    samples: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.samples["uid"])

    @property
    def num_tokens_S(self) -> np.ndarray:
        return self.samples["prompt_length"] + self.samples["response_length"]


@dataclass(frozen=True)
class ShardedBatch:
    """A step's batch placed on data-parallel ranks by the step's plan.

    samples: column -> [S] in the batch's order.  columns[dp_rank]: references to DataProto fragments, each with that
    rank's rows in `plan.rows` order; together they are its token columns.
    """

    plan: StepPlan
    samples: dict[str, np.ndarray]
    columns: tuple[tuple[Any, ...], ...]

    def shard_samples(self, dp_rank: int) -> dict[str, np.ndarray]:
        rows = list(self.plan.rows(dp_rank))
        return {name: column[rows] for name, column in self.samples.items()}

    def with_columns(self, fragments: Sequence[Any]) -> ShardedBatch:
        """fragments[dp_rank]: reference to more token columns of that rank's rows."""
        return replace(self, columns=tuple((*held, new) for held, new in zip(self.columns, fragments, strict=True)))

    def with_samples(self, **columns: np.ndarray) -> ShardedBatch:
        return replace(self, samples=self.samples | columns)
