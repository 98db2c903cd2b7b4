"""`Jagged`, a column of rows of different lengths, never padded."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Jagged:
    """A column of S rows of different lengths, end to end.

    values: [T, ...] any dtype and trailing dimensions, T = sum of lengths.
    cu_seqlens: [S + 1] int64, cu_seqlens[0] = 0.
    per_token: a row has one value for each token of its sample, so that it is as long as the row of input_ids; False:
    rows have lengths that say nothing of the tokens, such as the patches of a sample's pictures.
    """

    values: Tensor
    cu_seqlens: Tensor
    per_token: bool = True

    @classmethod
    def from_list(cls, rows: Sequence[Tensor | Sequence], dtype: torch.dtype, *, per_token: bool = True) -> Jagged:
        """Joins S sequences of numbers, or of arrays of one shape, into a column of that dtype."""
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        # A row without values, given as an empty list, has lost its trailing dimensions.
        filled = [row for row in tensors if len(row)] or tensors[:1]
        values = torch.cat(filled) if filled else torch.empty(0, dtype=dtype)
        return cls(values, cu_seqlens_of([len(row) for row in tensors]), per_token)

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
        return Jagged(values, cu_seqlens_of([lengths[row] for row in rows]), self.per_token)

    @staticmethod
    def concat(columns: Sequence[Jagged]) -> Jagged:
        """A column with the rows of all columns, in order."""
        filled = [column.values for column in columns if len(column.values)] or [columns[0].values]
        cu_seqlens = cu_seqlens_of(torch.cat([column.lengths for column in columns]))
        return Jagged(torch.cat(filled), cu_seqlens, columns[0].per_token)

    def __getstate__(self) -> dict[str, Any]:
        # numpy arrays cross the object store without a copy; torch tensors do not. Of pictures, which the samples of a
        # prompt have in common, each row crosses it once.
        firsts, places = ([], []) if self.per_token else _distinct_rows(self)
        sent = self.select(firsts) if len(firsts) < len(places) else self
        state = {"values": sent.values.numpy(), "cu_seqlens": sent.cu_seqlens.numpy(), "per_token": self.per_token}
        return state if sent is self else state | {"places": places}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Arrays from the object store are read-only; a copy may be changed in place. The experts of tokens (two more
        # dims) are larger than all else, and are not copied: all ranks of a node read them where they are.
        for name in ("values", "cu_seqlens"):
            array = state[name]
            object.__setattr__(self, name, _shared(array) if array.ndim > 2 else torch.from_numpy(array.copy()))
        object.__setattr__(self, "per_token", state["per_token"])
        if "places" in state:
            self.__dict__.update(vars(self.select(state["places"])))


def _distinct_rows(column: Jagged) -> tuple[list[int], list[int]]:
    """-> (the first row of each content, for each row the number of its content)."""
    firsts: list[int] = []
    places: list[int] = []
    # Length and a few values of a row -> contents that have them.
    alike: dict[tuple[int, bytes], list[int]] = {}
    for row in range(len(column)):
        values = column[row]
        few = values.flatten()[:: values.numel() // 64 + 1].numpy().tobytes()
        numbers = alike.setdefault((len(values), few), [])
        number = next((number for number in numbers if torch.equal(column[firsts[number]], values)), len(firsts))
        if number == len(firsts):
            firsts.append(row)
            numbers.append(number)
        places.append(number)
    return firsts, places


def _shared(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def cu_seqlens_of(lengths: Sequence[int] | Tensor) -> Tensor:
    """The bounds of S sequences of these lengths, end to end: [S + 1] int64 starting at 0."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.as_tensor(lengths, dtype=torch.int64).cumsum(0)])
