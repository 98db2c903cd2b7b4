"""Selects, joins, pads and unpads the columns of a batch row by row; a column is a [rows, ...] tensor or `Jagged`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from scalerl.batch.data_proto import Jagged, cu_seqlens_of

Column = Tensor | Jagged


def select_rows(column: Column, rows: Sequence[int]) -> Column:
    """Selects rows of a column, in the given order; a row may be selected more than once."""
    if isinstance(column, Tensor):
        return column[torch.as_tensor(rows, dtype=torch.int64, device=column.device)]
    if not rows:
        return Jagged(column.values[:0], cu_seqlens_of([]))
    return Jagged(torch.cat([column[row] for row in rows]), cu_seqlens_of(column.lengths[list(rows)]))


def join_columns(columns: Sequence[Column], name: str) -> Column:
    """Joins columns row after row. Raises ValueError where only some are jagged, or where dtypes or shapes differ."""
    kinds = {
        (type(column).__name__, column_values(column).dtype, tuple(column_values(column).shape[1:]))
        for column in columns
    }
    if len(kinds) > 1:
        raise ValueError(f"DataProto.concat: column {name!r} is of different kinds: {sorted(map(str, kinds))}")
    values = torch.cat([column_values(column) for column in columns])
    if isinstance(columns[0], Tensor):
        return values
    return Jagged(
        values, cu_seqlens_of(torch.cat([column.lengths for column in columns if isinstance(column, Jagged)]))
    )


def equal_columns(a: Column, b: Column) -> bool:
    """Whether two columns are equal in kind, dtype and every value."""
    if (
        type(a) is not type(b)
        or column_values(a).dtype != column_values(b).dtype
        or column_values(a).shape != column_values(b).shape
    ):
        return False
    lengths = isinstance(a, Tensor) or (isinstance(b, Jagged) and torch.equal(a.cu_seqlens, b.cu_seqlens))
    return lengths and torch.equal(column_values(a), column_values(b))


def unpadded(padded: Tensor, mask: Tensor) -> Jagged:
    """Drops the positions of a [rows, width, ...] tensor where mask [rows, width] is 0, wherever they are.

    Raises ValueError where the mask does not fit the tensor.
    """
    if padded.shape[:2] != mask.shape:
        raise ValueError(f"a mask of shape {tuple(mask.shape)} does not fit a column of {tuple(padded.shape)}")
    is_token = mask.bool()
    return Jagged(padded[is_token], cu_seqlens_of(is_token.sum(1)))


def padded(
    column: Jagged, width: int | None = None, pad_value: float = 0, side: Literal["left", "right"] = "right"
) -> Tensor:
    """Pads a column to [rows, width, ...] with pad_value.  width None: that of the longest row.

    Raises ValueError where a row is longer.
    """
    lengths = column.lengths
    longest = int(lengths.max()) if len(lengths) else 0
    width = longest if width is None else width
    if longest > width:
        raise ValueError(f"row {int(lengths.argmax())} has {longest} tokens, more than a width of {width}")
    out = column.values.new_full((len(column), width, *column.values.shape[1:]), pad_value)
    out[padding_mask(lengths, width, side).bool()] = column.values
    return out


def padding_mask(lengths: Tensor, width: int, side: Literal["left", "right"] = "right") -> Tensor:
    """Makes a mask [rows, width], int64: 1 on the tokens, 0 on the padding."""
    positions = torch.arange(width)[None]
    is_token = positions < lengths[:, None] if side == "right" else positions >= width - lengths[:, None]
    return is_token.to(torch.int64)


def column_values(column: Column) -> Tensor:
    """The numbers of a column: a tensor itself, or the tokens [T, ...] of a jagged one, end to end."""
    return column if isinstance(column, Tensor) else column.values


def is_tensordict(batch: Any) -> bool:
    """True for a TensorDict, which is a mapping too.

    A caller that has one has imported the package tensordict, which scalerl itself does not need.
    """
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and isinstance(batch, tensordict.TensorDictBase)
