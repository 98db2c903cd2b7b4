"""`HeldBatches`: the samples that a rollout worker keeps for the trainer, and the token columns that it hands out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from scalerl.batch.columns import POLICY_VERSIONS, ROUTED_EXPERTS
from scalerl.batch.data_proto import DataProto

# Token columns that a rank does not get with the others: no pass reads the first; the second is many times as large as
# all others together, and the actor alone reads it.
APART = {POLICY_VERSIONS.name, ROUTED_EXPERTS.name}


class HeldBatches:
    """The base class of a rollout worker that keeps batches by id until `drop`; the trainer's side asks it for rows."""

    def __init__(self) -> None:
        self.batches: dict[int, DataProto] = {}
        self.batch_ids = itertools.count()

    def hold(self, batch: DataProto) -> int:
        """Keeps a batch, and returns its id."""
        batch_id = next(self.batch_ids)
        self.batches[batch_id] = batch
        return batch_id

    def select(
        self, wanted: Sequence[tuple[int, Sequence[int]]], *, column: str | None = None, all_columns: bool = False
    ) -> DataProto | list[DataProto]:
        """Selects rows of held batches; returns a DataProto of token columns for each (batch id, rows).

        column: that token column alone; None: those that ranks get together, with all_columns all.
        """

        def columns(batch_id: int) -> DataProto:
            tokens = self.batches[batch_id].tokens
            if column is not None:
                return DataProto({column: tokens[column]})
            return DataProto({name: tokens[name] for name in tokens if all_columns or name not in APART})

        return _one_each([columns(batch_id).select(rows) for batch_id, rows in wanted])

    def regroup(self, groups: Sequence[Sequence[int]], *columns: DataProto) -> DataProto | list[DataProto]:
        """Regroups rows of token columns into a DataProto for each rank, group of ranks, or file of a dump.

        columns: what workers selected, or ranks made.  groups[i]: positions of its rows in the columns, joined.
        """
        joined = DataProto.concat(list(columns))
        return _one_each([joined.select(rows) for rows in groups])

    def all_tokens(self, batch_id: int) -> DataProto:
        """The token columns of a batch, with those that ranks do not get together."""
        return DataProto(self.batches[batch_id].tokens)

    def join(self, wanted: Sequence[tuple[int, Sequence[int]]]) -> int:
        """Joins rows of several batches (batch id, rows), in order, into one and returns its id; drops the batches."""
        joined = DataProto.concat([self.batches[batch_id].select(rows) for batch_id, rows in wanted])
        for batch_id, _ in wanted:
            self.drop(batch_id)
        return self.hold(joined)

    def drop(self, batch_id: int) -> None:
        self.batches.pop(batch_id, None)


def _one_each(made: list[DataProto]) -> DataProto | list[DataProto]:
    """Unpacks a list of one object, as Ray wants the return values of a method with one reference for each."""
    return made if len(made) > 1 else made[0]
