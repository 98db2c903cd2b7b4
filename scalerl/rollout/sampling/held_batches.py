"""`HeldBatches`: the samples that a rollout worker keeps for the trainer, and how their rows are dealt to ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from scalerl.batch.data_proto import DataProto

# Token columns that the trainer's passes read; the others are for dumps.
TRAINED_COLUMNS = ("input_ids", "response_mask", "rollout_logprobs")


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

    def cut(self, cuts: Sequence[tuple[int, Sequence[int]]], *, trained: bool = True) -> DataProto | list[DataProto]:
        """Selects rows of held batches; returns a DataProto of token columns for each (batch id, rows).

        trained: with the columns that ranks train on, else with all.
        """
        columns = self._trained_tokens if trained else self.all_tokens
        return _one_each([columns(batch_id).select(rows) for batch_id, rows in cuts])

    def deal(self, ranks: Sequence[Sequence[int]], *parts: DataProto) -> DataProto | list[DataProto]:
        """Reorders the rows that workers cut into a DataProto for each rank, or for each part of a dump.

        parts: what workers cut, or ranks made.  ranks[i]: positions of its rows in the parts, one after another.
        """
        joined = DataProto.concat(list(parts))
        return _one_each([joined.select(rows) for rows in ranks])

    def _trained_tokens(self, batch_id: int) -> DataProto:
        tokens = self.batches[batch_id].tokens
        return DataProto({name: tokens[name] for name in TRAINED_COLUMNS})

    def all_tokens(self, batch_id: int) -> DataProto:
        """The token columns of a batch, those that are for dumps alone too."""
        return DataProto(self.batches[batch_id].tokens)

    def join(self, parts: Sequence[tuple[int, Sequence[int]]]) -> int:
        """Joins parts (batch, rows of it), in order, into one batch and returns its id; the batches are dropped."""
        joined = DataProto.concat([self.batches[batch_id].select(rows) for batch_id, rows in parts])
        for batch_id, _ in parts:
            self.drop(batch_id)
        return self.hold(joined)

    def drop(self, batch_id: int) -> None:
        self.batches.pop(batch_id, None)


def _one_each(made: list[DataProto]) -> DataProto | list[DataProto]:
    """Unpacks a list of one object, as Ray wants the return values of a method with one reference for each."""
    return made if len(made) > 1 else made[0]
