"""Collates the rows of a batch into columns, as verl does.

A run of scalerl uses the columns of `batch.DataProto`, which have no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def collate_fn(data_list: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor | np.ndarray]:
    """Collates rows into columns: tensors are stacked to [rows, *dims], all else becomes an object array [rows].

    Raises ValueError, naming key and rows, when rows differ in keys, or tensors of a key in shape or dtype.
    """
    keys = dict.fromkeys(key for row in data_list for key in row)
    for key in keys:
        missing = [i for i, row in enumerate(data_list) if key not in row]
        if missing:
            raise ValueError(f"collate_fn: key {key!r} is missing in rows {missing} of {len(data_list)}; add it there")
    return {key: _column(key, [row[key] for row in data_list]) for key in keys}


def _column(key: str, values: list[Any]) -> torch.Tensor | np.ndarray:
    is_tensor = [isinstance(value, torch.Tensor) for value in values]
    if not any(is_tensor):
        column = np.empty(len(values), dtype=object)
        # Elementwise: numpy would make a matrix of equally long lists.
        for i, value in enumerate(values):
            column[i] = value
        return column
    if not all(is_tensor):
        rows = [i for i, tensor in enumerate(is_tensor) if not tensor]
        raise ValueError(f"collate_fn: key {key!r} is a tensor in some rows, but not in rows {rows}")
    kind = (values[0].shape, values[0].dtype)
    rows = [i for i, value in enumerate(values) if (value.shape, value.dtype) != kind]
    if rows:
        other = values[rows[0]]
        raise ValueError(
            f"collate_fn: key {key!r} is {tuple(kind[0])} {kind[1]} in row 0, "
            f"but {tuple(other.shape)} {other.dtype} in row {rows[0]}; rows that differ: {rows}"
        )
    return torch.stack(values)
