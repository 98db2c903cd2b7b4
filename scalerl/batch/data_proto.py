"""`DataProto`, the columnar batch that workers exchange; its jagged columns are never padded.

A column of tokens has one value per token of prompt + response, and so the lengths of `input_ids`: `Jagged.per_token`.
`logprobs`-like columns hold at position t the log-probability of token t given the tokens before it (0 at position 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from scalerl.batch.columns import Column, V
from scalerl.batch.jagged import Jagged, cu_seqlens_of

__all__ = ["DataProto", "Jagged", "cu_seqlens_of"]


@dataclass
class DataProto:
    """A batch of S samples, as columns by name.

    tokens: Jagged columns with S rows; those that are per_token have rows of equal lengths.
    samples: [S] arrays (object dtype for strings and dicts).  meta: any values.
    """

    tokens: dict[str, Jagged] = field(default_factory=dict)
    samples: dict[str, np.ndarray] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in (*self.tokens.items(), *self.samples.items())}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"DataProto columns have different numbers of rows: {lengths}")
        num_tokens = {name: tuple(column.lengths.tolist()) for name, column in self.tokens.items() if column.per_token}
        if len(set(num_tokens.values())) > 1:
            names = sorted(num_tokens)
            row = next(i for i in range(len(self)) if len({num_tokens[name][i] for name in names}) > 1)
            raise ValueError(
                f"DataProto token columns differ in row {row}: "
                + ", ".join(f"{n} has {num_tokens[n][row]}" for n in names)
            )

    def __getitem__(self, column: Column[V]) -> V:
        """The column.  Raises KeyError for a column that the batch does not have."""
        found = self.samples.get(column.name) if column.shape == "S" else self.tokens.get(column.name)
        if found is None:
            known = sorted(self.tokens.keys() | self.samples.keys())
            raise KeyError(f"the batch has no {column.name} [{column.shape}]; it has {known}")
        return cast("V", found)

    def __len__(self) -> int:
        for column in (*self.tokens.values(), *self.samples.values()):
            return len(column)
        return 0

    def select(self, rows: Sequence[int]) -> DataProto:
        """A batch with these rows of every column, in their order, and the same meta."""
        rows = list(rows)
        return DataProto(
            {name: column.select(rows) for name, column in self.tokens.items()},
            {name: column[rows] for name, column in self.samples.items()},
            self.meta,
        )

    def union(self, other: DataProto) -> DataProto:
        """A batch with the columns of both.  Raises ValueError for a column that is in both."""
        both = (self.tokens.keys() & other.tokens.keys()) | (self.samples.keys() & other.samples.keys())
        if both:
            raise ValueError(f"DataProto.union: columns {sorted(both)} are in both batches; drop or rename one")
        return DataProto(self.tokens | other.tokens, self.samples | other.samples, self.meta | other.meta)

    @staticmethod
    def concat(batches: Sequence[DataProto]) -> DataProto:
        """A batch with the rows of all batches, in order; meta is that of the first.

        Raises ValueError unless all have the same columns.
        """
        first = batches[0]
        for other in batches[1:]:
            if other.tokens.keys() != first.tokens.keys() or other.samples.keys() != first.samples.keys():
                raise ValueError(
                    f"DataProto.concat: columns {sorted(other.tokens.keys() | other.samples.keys())} "
                    f"differ from {sorted(first.tokens.keys() | first.samples.keys())}"
                )
        return DataProto(
            {name: Jagged.concat([batch.tokens[name] for batch in batches]) for name in first.tokens},
            {name: np.concatenate([batch.samples[name] for batch in batches]) for name in first.samples},
            first.meta,
        )
