"""`DataProto`, the columnar batch that workers exchange; its token columns are jagged, never padded.

Every token column of a batch has one value per token of prompt + response, so all share the same `cu_seqlens`.
`logprobs`-like columns hold at position t the log-probability of token t given the tokens before it (0 at position 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Jagged:
    """A token column: S sequences of different lengths, end to end.

    values: [T] any dtype, T = sum of lengths.  cu_seqlens: [S + 1] int64, cu_seqlens[0] = 0.
    """

    values: Tensor
    cu_seqlens: Tensor

    @classmethod
    def from_list(cls, rows: Sequence[Tensor | Sequence], dtype: torch.dtype) -> Jagged:
        """Joins S sequences of numbers into a column of that dtype."""
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        values = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)
        return cls(values, cu_seqlens_of([len(row) for row in tensors]))

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    def __getitem__(self, row: int) -> Tensor:
        return self.values[self.cu_seqlens[row] : self.cu_seqlens[row + 1]]

    @property
    def lengths(self) -> Tensor:
        """[S] int64 length of each sequence."""
        return self.cu_seqlens.diff()

    def select(self, rows: Sequence[int]) -> Jagged:
        """A column with copies of these rows, in their order."""
        lengths = self.lengths.tolist()
        each = self.values.split(lengths)
        values = torch.cat([each[row] for row in rows]) if len(rows) else self.values[:0].clone()
        return Jagged(values, cu_seqlens_of([lengths[row] for row in rows]))

    def __getstate__(self) -> dict[str, np.ndarray]:
        # numpy arrays cross the object store without a copy; torch tensors do not.
        return {"values": self.values.numpy(), "cu_seqlens": self.cu_seqlens.numpy()}

    def __setstate__(self, state: dict[str, np.ndarray]) -> None:
        # Arrays from the object store are read-only; a copy may be changed in place.
        for name, array in state.items():
            object.__setattr__(self, name, torch.from_numpy(array.copy()))


def cu_seqlens_of(lengths: Sequence[int] | Tensor) -> Tensor:
    """The bounds of S sequences of these lengths, end to end: [S + 1] int64 starting at 0."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.as_tensor(lengths, dtype=torch.int64).cumsum(0)])


@dataclass
class DataProto:
    """A batch of S samples, as columns by name.

    tokens: Jagged columns with S rows.  samples: [S] arrays (object dtype for strings and dicts).  meta: any values.
    """

    tokens: dict[str, Jagged] = field(default_factory=dict)
    samples: dict[str, np.ndarray] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in (*self.tokens.items(), *self.samples.items())}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"DataProto columns have different numbers of rows: {lengths}")
        num_tokens = {name: tuple(column.lengths.tolist()) for name, column in self.tokens.items()}
        if len(set(num_tokens.values())) > 1:
            names = sorted(num_tokens)
            row = next(i for i in range(len(self)) if len({num_tokens[name][i] for name in names}) > 1)
            raise ValueError(
                f"DataProto token columns differ in row {row}: "
                + ", ".join(f"{n} has {num_tokens[n][row]}" for n in names)
            )

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
            {
                name: Jagged(
                    torch.cat([batch.tokens[name].values for batch in batches]),
                    cu_seqlens_of(torch.cat([batch.tokens[name].lengths for batch in batches])),
                )
                for name in first.tokens
            },
            {name: np.concatenate([batch.samples[name] for batch in batches]) for name in first.samples},
            first.meta,
        )
