"""Rows of variable length: one flat numpy array of them, small to pickle and quick to send, and their truncation."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class RaggedArray:
    """Rows of variable length.  values: [T], the rows end to end.  cu_seqlens: [rows + 1] int64, first 0."""

    def __init__(self, rows: Sequence[Any], dtype: np.dtype | type) -> None:
        lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        self.cu_seqlens = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        self.values = np.empty(self.cu_seqlens[-1], dtype)
        for start, row in zip(self.cu_seqlens, rows, strict=False):
            self.values[start : start + len(row)] = row

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.cu_seqlens[row] : self.cu_seqlens[row + 1]]


class PackedObjects:
    """Python objects in one byte array; each is unpacked on access, so every caller gets its own copy."""

    def __init__(self, objects: Iterable[Any]) -> None:
        packed = [pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL) for item in objects]
        self._bytes = RaggedArray([np.frombuffer(item, np.uint8) for item in packed], np.uint8)

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, row: int) -> Any:
        return pickle.loads(self._bytes[row].data)


def truncate(tokens: Sequence[T], max_length: int, side: str) -> Sequence[T]:
    """Cuts a sequence to at most max_length tokens.

    side: where tokens are cut: left | right | middle (the end keeps the odd token).
    """
    if len(tokens) <= max_length:
        return tokens
    if side == "right":
        return tokens[:max_length]
    if side == "left":
        return tokens[len(tokens) - max_length :]
    if side == "middle":
        front = max_length // 2
        return [*tokens[:front], *tokens[len(tokens) - (max_length - front) :]]
    raise ValueError(f"truncation={side!r}: use left, right or middle")
