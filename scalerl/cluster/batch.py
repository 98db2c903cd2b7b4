"""A step's batch as the controller holds it: one row of metadata per sample, and references to the tokens.

Rows are samples that rollout workers hold. A shard is the part of a batch, or of a column, on one data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import ray

from scalerl.batch import StepPlan
from scalerl.batch.columns import Column
from scalerl.batch.data_proto import DataProto

# The rollout's token columns as one TokenColumn of a PlacedBatch: input_ids, response_mask, rollout_logprobs.
TOKENS = "tokens"


def positions_by_label(label_R: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Each label that occurs, in order, and its positions: one pass, however many labels there are."""
    positions_R = np.argsort(label_R, kind="stable")
    labels, starts = np.unique(label_R[positions_R], return_index=True)
    return list(zip(labels.tolist(), np.split(positions_R, starts[1:]), strict=True)) if len(labels) else []


def _no_rows() -> np.ndarray:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class HeldRows:
    """Samples whose tokens rollout workers hold.

    samples: column -> [S].  batches: (rollout worker, id of a batch that it holds); empty: no worker holds the tokens.
    batch_S, row_S: [S] index into `batches`, and position in that batch, of each sample.
    """

    samples: dict[str, np.ndarray]
    batches: tuple[tuple[int, int], ...] = ()
    batch_S: np.ndarray = field(default_factory=_no_rows)
    row_S: np.ndarray = field(default_factory=_no_rows)

    def __len__(self) -> int:
        return len(self.samples["uid"])

    @property
    def num_tokens_S(self) -> np.ndarray:
        return self.samples["prompt_length"] + self.samples["response_length"]

    def by_batch(self, wanted: Sequence[int]) -> list[tuple[int, int, list[int], list[int]]]:
        """Splits the wanted samples by the batch that has them; in each batch they keep their order.

        Returns (worker, batch id, rows in that batch, positions of these rows in `wanted`) for each batch.
        """
        wanted_R = np.asarray(wanted, dtype=np.int64)
        row_R = self.row_S[wanted_R]
        return [
            (*self.batches[batch], row_R[positions].tolist(), positions.tolist())
            for batch, positions in positions_by_label(self.batch_S[wanted_R])
        ]

    def with_samples(self, **columns: np.ndarray) -> HeldRows:
        return replace(self, samples=self.samples | columns)


@dataclass(frozen=True)
class TokenColumn:
    """Token columns of the whole batch. shards[dp_rank]: a reference to a DataProto with the rows of
    plan.rows(dp_rank), in that order."""

    plan: StepPlan
    shards: tuple[Any, ...]
    # id of another plan of the batch -> the column on the ranks of that plan.
    resharded: dict[int, TokenColumn] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        assert len(self.shards) == self.plan.dp_size, f"{len(self.shards)} shards, {self.plan.dp_size} ranks"


@dataclass(frozen=True)
class ShardedBatch:
    """The input of one pass, for the data-parallel ranks of its plan.

    samples: column -> [S] in the batch's order.  columns[i][dp_rank]: a reference to the shard of a token column.
    """

    plan: StepPlan
    samples: dict[str, np.ndarray]
    columns: tuple[tuple[Any, ...], ...] = ()

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


def reshard_on_driver(column: TokenColumn, plan: StepPlan) -> list[Any]:
    """The shards of a column under another plan, made by the driver: for a batch that no rollout worker holds."""
    rows = np.argsort(column.plan.rows_by_rank)
    joined = DataProto.concat(ray.get(list(column.shards)))
    return [ray.put(joined.select(rows[list(plan.rows(dp_rank))].tolist())) for dp_rank in range(plan.dp_size)]


@dataclass(frozen=True)
class PlacedBatch:
    """A step's batch as the training loop holds it.

    samples: column -> [S] in the batch's order.  plans: role -> split over its ranks.  columns: name -> TokenColumn.
    reshard: makes the shards of a column under another plan.
    """

    samples: dict[str, np.ndarray]
    plans: Mapping[str, StepPlan]
    columns: Mapping[str, TokenColumn] = field(default_factory=dict)
    reshard: Callable[[TokenColumn, StepPlan], Sequence[Any]] = reshard_on_driver

    def shards(self, role: str, *columns: Column | str) -> ShardedBatch:
        """The named columns, of tokens or of samples, for that role's ranks.

        Others stay here: a column that no rank reads would be sent to each rank, in each pass. Raises KeyError for a
        missing column.
        """
        names = list(dict.fromkeys(map(str, columns)))
        known = self.columns.keys() | self.samples.keys()
        if missing := [name for name in names if name not in known]:
            raise KeyError(f"the batch has no {', '.join(missing)} for {role}; it has {sorted(known)}")
        plan = self.plans[role]
        of_tokens = [name for name in names if name in self.columns]
        samples = {name: self.samples[name] for name in names if name not in self.columns}
        return ShardedBatch(plan, samples, tuple(self._under(plan, self.columns[name]).shards for name in of_tokens))

    def _under(self, plan: StepPlan, column: TokenColumn) -> TokenColumn:
        # Plans of equal numbers are equal, whoever made them.
        if column.plan.micro_batches == plan.micro_batches:
            return column
        if id(plan) not in column.resharded:
            column.resharded[id(plan)] = TokenColumn(plan, tuple(self.reshard(column, plan)))
        return column.resharded[id(plan)]

    def with_column(self, column: Column | str, role: str, shards: Sequence[Any]) -> PlacedBatch:
        """The batch with one more token column.  shards[dp_rank]: of the rows of that role's rank, in its order."""
        return replace(self, columns={**self.columns, str(column): TokenColumn(self.plans[role], tuple(shards))})

    def has(self, column: Column | str) -> bool:
        return str(column) in self.columns or str(column) in self.samples

    def with_samples(self, **columns: np.ndarray) -> PlacedBatch:
        return replace(self, samples=self.samples | columns)
