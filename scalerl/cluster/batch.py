"""What the controller holds of a step's batch: one row of metadata per sample and references to the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from scalerl.balance import StepPlan
from scalerl.cluster.dispatch import MicroBatches


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

    def with_samples(self, **columns: np.ndarray) -> BatchRef:
        return replace(self, samples=self.samples | columns)


@dataclass(frozen=True)
class Column:
    """Token columns of the whole batch. fragments[dp_rank]: a reference to a DataProto with the rows of
    plan.rows(dp_rank), in that order."""

    plan: StepPlan
    fragments: tuple[Any, ...]

    def __post_init__(self) -> None:
        assert len(self.fragments) == self.plan.dp_size, f"{len(self.fragments)} fragments, {self.plan.dp_size} ranks"

    @cached_property
    def places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[S]: the fragment that has a row; [S]: where in it; [dp_size]: rows of each fragment."""
        rows = [self.plan.rows(dp_rank) for dp_rank in range(self.plan.dp_size)]
        sizes = np.array([len(of_rank) for of_rank in rows])
        rank_S, position_S = np.empty(sizes.sum(), np.int64), np.empty(sizes.sum(), np.int64)
        for dp_rank, of_rank in enumerate(rows):
            rank_S[list(of_rank)] = dp_rank
            position_S[list(of_rank)] = np.arange(len(of_rank))
        return rank_S, position_S, sizes


@dataclass(frozen=True)
class Part:
    """What a rank needs of a column. order: rows of the fragments, joined end to end, in the rank's order; None: as
    they are."""

    fragments: tuple[Any, ...]
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Shard:
    """What a data-parallel rank gets of a pass beside its token columns.

    micro_batches: positions in its rows.  samples: column -> [rows].
    parts: per token column, how many fragments it has and `Part.order`.
    """

    micro_batches: MicroBatches
    samples: dict[str, np.ndarray]
    parts: list[tuple[int, tuple[int, ...] | None]]


@dataclass(frozen=True)
class ShardedBatch:
    """What one pass gets: samples and token columns for the data-parallel ranks of its plan.

    A column that was made under another plan is put together from the fragments that have the rank's rows.
    """

    plan: StepPlan
    samples: dict[str, np.ndarray]
    columns: tuple[Column, ...] = ()

    def shard_samples(self, dp_rank: int) -> dict[str, np.ndarray]:
        rows = list(self.plan.rows(dp_rank))
        return {name: column[rows] for name, column in self.samples.items()}

    def joined_samples(self, shards: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Column -> [S] in the batch's order. shards[dp_rank]: columns of the rows of plan.rows(dp_rank)."""
        if not shards[0]:
            return {}
        order = np.argsort([row for dp_rank in range(self.plan.dp_size) for row in self.plan.rows(dp_rank)])
        return {name: np.concatenate([shard[name] for shard in shards])[order] for name in shards[0]}

    def parts(self, dp_rank: int) -> list[Part]:
        """One for each column."""
        return [self._part(column, dp_rank) for column in self.columns]

    def _part(self, column: Column, dp_rank: int) -> Part:
        if id(column) in self._under_this_plan:
            return Part((column.fragments[dp_rank],))
        rank_S, position_S, sizes = column.places
        rows = list(self.plan.rows(dp_rank))
        ranks, which = np.unique(rank_S[rows], return_inverse=True)
        starts = np.concatenate([[0], np.cumsum(sizes[ranks])])
        order = starts[which] + position_S[rows]
        return Part(tuple(column.fragments[rank] for rank in ranks), tuple(order.tolist()))

    @cached_property
    def _under_this_plan(self) -> set[int]:
        # Plans of equal numbers are equal, whoever made them.
        return {id(column) for column in self.columns if column.plan.micro_batches == self.plan.micro_batches}


@dataclass(frozen=True)
class PlacedBatch:
    """A step's batch as the loop holds it.

    samples: column -> [S] in the batch's order.  plans: role -> how its model sees the batch.  columns: name -> Column.
    """

    samples: dict[str, np.ndarray]
    plans: Mapping[str, StepPlan]
    columns: Mapping[str, Column] = field(default_factory=dict)

    def shards(self, role: str, *columns: str) -> ShardedBatch:
        """The samples, and the columns that are named, for that role's ranks."""
        missing = [name for name in columns if name not in self.columns]
        if missing:
            raise KeyError(f"the batch has no {', '.join(missing)} for {role}; it has {sorted(self.columns)}")
        return ShardedBatch(self.plans[role], self.samples, tuple(self.columns[name] for name in columns))

    def with_column(self, name: str, role: str, fragments: Sequence[Any]) -> PlacedBatch:
        """fragments[dp_rank]: as that role's ranks returned them."""
        return replace(self, columns={**self.columns, name: Column(self.plans[role], tuple(fragments))})

    def with_samples(self, **columns: np.ndarray) -> PlacedBatch:
        return replace(self, samples=self.samples | columns)
