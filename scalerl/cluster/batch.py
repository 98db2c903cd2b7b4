"""A step's batch as the controller holds it: one row of metadata per sample, and references to the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from scalerl.batch import StepPlan
from scalerl.cluster.dispatch import MicroBatches

# The rollout's token columns as one TokenColumn of a PlacedBatch: input_ids, response_mask, rollout_logprobs.
TOKENS = "tokens"


def places_by_label(label_R: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Each label that occurs, in order, and its positions: one pass, however many labels there are."""
    places_R = np.argsort(label_R, kind="stable")
    labels, starts = np.unique(label_R[places_R], return_index=True)
    return list(zip(labels.tolist(), np.split(places_R, starts[1:]), strict=True)) if len(labels) else []


@dataclass(frozen=True)
class RowsOfWorker:
    """Requested rows that are in one batch of one rollout worker.

    rows: their positions in that batch.  places: their positions among the requested rows.
    """

    worker: int
    batch_id: int
    rows: list[int]
    places: list[int]


@dataclass(frozen=True)
class HeldRows:
    """Where the rows of a batch are. batches: (rollout worker, id of a batch that it holds).

    batch_S, row_S: [S] index into `batches`, and position in that batch, of each row.
    """

    batches: tuple[tuple[int, int], ...]
    batch_S: np.ndarray
    row_S: np.ndarray

    def pieces(self, rows: Sequence[int]) -> list[RowsOfWorker]:
        """Splits the requested rows by the batch that has them; in each they keep their order."""
        rows_R = np.asarray(rows, dtype=np.int64)
        row_R = self.row_S[rows_R]
        return [
            RowsOfWorker(*self.batches[batch], row_R[places].tolist(), places.tolist())
            for batch, places in places_by_label(self.batch_S[rows_R])
        ]

    def select(self, rows: Sequence[int]) -> HeldRows:
        return HeldRows(self.batches, self.batch_S[list(rows)], self.row_S[list(rows)])


@dataclass(frozen=True)
class BatchRef:
    """Samples that rollout workers made and still hold. samples: column name -> [S]."""

    held: HeldRows
    samples: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.samples["uid"])

    @property
    def num_tokens_S(self) -> np.ndarray:
        return self.samples["prompt_length"] + self.samples["response_length"]

    def with_samples(self, **columns: np.ndarray) -> BatchRef:
        return replace(self, samples=self.samples | columns)


@dataclass(frozen=True)
class TokenColumn:
    """Token columns of the whole batch. fragments[dp_rank]: a reference to a DataProto with the rows of
    plan.rows(dp_rank), in that order."""

    plan: StepPlan
    fragments: tuple[Any, ...]
    # id of another plan of the batch -> the column, dealt to the ranks of that one.
    dealt: dict[int, TokenColumn] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        ranks = self.plan.dp_size
        assert len(self.fragments) == ranks, f"{len(self.fragments)} fragments, {ranks} ranks"

    @property
    def rows_of_fragments(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.plan.rows(dp_rank) for dp_rank in range(self.plan.dp_size))

    @cached_property
    def places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[S]: the fragment of each row; [S]: its position in that fragment; [fragments]: number of rows of each."""
        sizes = np.array([len(rows) for rows in self.rows_of_fragments])
        fragment_S, position_S = np.empty(sizes.sum(), np.int64), np.empty(sizes.sum(), np.int64)
        for fragment, rows in enumerate(self.rows_of_fragments):
            fragment_S[list(rows)] = fragment
            position_S[list(rows)] = np.arange(len(rows))
        return fragment_S, position_S, sizes


@dataclass(frozen=True)
class ColumnFragments:
    """The fragments of a column that have a rank's rows. order: positions of these rows in the fragments joined end to
    end; None: the fragments have exactly the rank's rows, in its order."""

    fragments: tuple[Any, ...]
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Shard:
    """What a data-parallel rank gets for a pass, apart from its token columns.

    micro_batches: positions in its rows.  samples: column -> [rows].
    parts: per token column, how many fragments it has and `ColumnFragments.order`.
    """

    micro_batches: MicroBatches
    samples: dict[str, np.ndarray]
    parts: list[tuple[int, tuple[int, ...] | None]]


@dataclass(frozen=True)
class ShardedBatch:
    """The input of one pass: samples and token columns, to be cut for the data-parallel ranks of its plan.

    A column that was made under another plan is put together from the fragments that have the rank's rows.
    """

    plan: StepPlan
    samples: dict[str, np.ndarray]
    columns: tuple[TokenColumn, ...] = ()

    def shard_samples(self, dp_rank: int) -> dict[str, np.ndarray]:
        start, end = self.plan.starts[dp_rank : dp_rank + 2]
        return {name: column[start:end] for name, column in self._samples_by_rank.items()}

    @cached_property
    def _samples_by_rank(self) -> dict[str, np.ndarray]:
        return {name: column[self.plan.rows_by_rank] for name, column in self.samples.items()}

    def joined_samples(self, shards: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Joins sample columns into column -> [S] in the batch's order. shards[dp_rank]: rows of plan.rows(dp_rank)."""
        if not shards[0]:
            return {}
        order = np.argsort(self.plan.rows_by_rank)
        return {name: np.concatenate([shard[name] for shard in shards])[order] for name in shards[0]}

    def parts(self, dp_rank: int) -> list[ColumnFragments]:
        """The `ColumnFragments` of each column for a rank, in the order of `columns`."""
        return [self._part(column, dp_rank) for column in self.columns]

    def _part(self, column: TokenColumn, dp_rank: int) -> ColumnFragments:
        if id(column) in self._under_this_plan:
            return ColumnFragments((column.fragments[dp_rank],))
        fragment_S, position_S, sizes = column.places
        rows = list(self.plan.rows(dp_rank))
        if not rows:
            return ColumnFragments(column.fragments[:1], ())
        fragments, which = np.unique(fragment_S[rows], return_inverse=True)
        starts = np.concatenate([[0], np.cumsum(sizes[fragments])])
        order = starts[which] + position_S[rows]
        return ColumnFragments(tuple(column.fragments[fragment] for fragment in fragments), tuple(order.tolist()))

    @cached_property
    def _under_this_plan(self) -> set[int]:
        # Plans of equal numbers are equal, whoever made them.
        return {id(column) for column in self.columns if column.plan.micro_batches == self.plan.micro_batches}


@dataclass(frozen=True)
class PlacedBatch:
    """A step's batch as the training loop holds it.

    samples: column -> [S] in the batch's order.  plans: role -> split over its ranks.  columns: name -> TokenColumn.
    deal: makes the fragments of a column under another plan; None: each rank puts its rows together from the fragments
    that have any, which with many ranks are nearly all of them.
    """

    samples: dict[str, np.ndarray]
    plans: Mapping[str, StepPlan]
    columns: Mapping[str, TokenColumn] = field(default_factory=dict)
    deal: Callable[[TokenColumn, StepPlan], Sequence[Any]] | None = None

    def shards(self, role: str, *columns: str) -> ShardedBatch:
        """The named columns, of tokens or of samples, to be cut for that role's ranks.

        Others stay here: what a rank does not read would be sent to each of them, in each pass. Raises KeyError for a
        missing column.
        """
        known = self.columns.keys() | self.samples.keys()
        if missing := [name for name in columns if name not in known]:
            raise KeyError(f"the batch has no {', '.join(missing)} for {role}; it has {sorted(known)}")
        plan = self.plans[role]
        of_tokens = [name for name in columns if name in self.columns]
        samples = {name: self.samples[name] for name in columns if name not in self.columns}
        return ShardedBatch(plan, samples, tuple(self._under(plan, self.columns[name]) for name in of_tokens))

    def _under(self, plan: StepPlan, column: TokenColumn) -> TokenColumn:
        # Plans of equal numbers are equal, whoever made them.
        if self.deal is None or column.plan.micro_batches == plan.micro_batches:
            return column
        if id(plan) not in column.dealt:
            column.dealt[id(plan)] = TokenColumn(plan, tuple(self.deal(column, plan)))
        return column.dealt[id(plan)]

    def with_column(self, name: str, role: str, fragments: Sequence[Any]) -> PlacedBatch:
        """The batch with one more token column.  fragments[dp_rank]: of the rows of that role's rank, in its order."""
        return replace(self, columns={**self.columns, name: TokenColumn(self.plans[role], tuple(fragments))})

    def with_samples(self, **columns: np.ndarray) -> PlacedBatch:
        return replace(self, samples=self.samples | columns)
