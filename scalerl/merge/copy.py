"""Copying of a checkpoint's numbers into Hugging Face files, by several threads, one stored piece at a time.

Each Hugging Face tensor consists of rows of one stored tensor (`Param.rows_of`), so a piece goes from its file straight
to its places: read into a buffer, checked, converted if another dtype is asked for, written. The only tensors that are
ever whole in memory are those that are split over their columns, which are put together first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch

from scalerl.checkpoint.pieces import MAX_PIECE_BYTES
from scalerl.checkpoint.torch_dist import DistCheckpoint, StoredPiece, fresh_bytes
from scalerl.families import ModelShape, Param, RowRange
from scalerl.merge.writer import SafetensorsFile

MAX_WORKERS = 8
# Bytes of a tensor that are converted at a time.
_CHUNK_BYTES = 4 * 2**20
# Bytes that all threads may take together beside the largest tensor.
_MORE_BYTES = 128 * 2**20
# Pieces of more rows than these that have not all columns are put together in memory.
_FEW_ROWS = 16


@dataclass(frozen=True)
class Copy:
    """One stored tensor and where its rows go. files: by Hugging Face name."""

    key: str
    rows: Sequence[RowRange]
    files: Mapping[str, SafetensorsFile]
    dtype: torch.dtype


def copies(
    params: Sequence[Param],
    keys: Mapping[str, str],
    shape: ModelShape,
    dtypes: Sequence[torch.dtype],
    files: Mapping[str, SafetensorsFile],
) -> list[Copy]:
    """One Copy for each parameter.  files: the file of every Hugging Face tensor, by name."""
    return [
        Copy(keys[param.name], param.rows_of(shape), {name: files[name] for name in param.hf}, dtype)
        for param, dtype in zip(params, dtypes, strict=True)
    ]


def copy_all(checkpoint: DistCheckpoint, wanted: Sequence[Copy], num_workers: int | None = None) -> None:
    """Makes all copies, by several threads; raises the exception of a copy that failed.

    Memory: at most that of the largest tensor twice, and of a few pieces.
    """
    num_workers = num_workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    largest = max(checkpoint.tensors[copy.key].num_bytes for copy in wanted)
    sizes = (piece.payload_bytes for copy in wanted for piece in checkpoint.pieces(copy.key))
    memory = _Memory(largest + _MORE_BYTES, max((size for size in sizes if size <= MAX_PIECE_BYTES), default=0))
    with ThreadPoolExecutor(num_workers, thread_name_prefix="merge") as pool:
        # The largest first, so that no thread waits for one of them in the end.
        order = sorted(wanted, key=lambda copy: -checkpoint.tensors[copy.key].num_bytes)
        waiting = [
            pool.submit(_copy, checkpoint, copy, job, memory) for copy in order for job in _jobs(checkpoint, copy)
        ]
        done, others = wait(waiting, return_when=FIRST_EXCEPTION)
        for future in others:
            future.cancel()
    for future in done:
        future.result()


class _Memory:
    """The memory that all threads share, with buffers that they reuse: fresh memory costs as much as reading."""

    def __init__(self, limit: int, buffer_bytes: int) -> None:
        """buffer_bytes: of the largest piece that has a buffer."""
        self._limit = self._free = limit
        self._buffer_bytes = buffer_bytes
        self._changed = threading.Condition()
        self._buffers: list[torch.Tensor] = []

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        """Takes `size` bytes, once they are free, for the block; all of the memory if `size` is larger than that."""
        size = min(size, self._limit)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()

    @contextmanager
    def buffer(self, num_bytes: int) -> Iterator[torch.Tensor | None]:
        """A buffer for a piece of that size; None for a piece that is larger than those that scalerl writes."""
        if num_bytes > MAX_PIECE_BYTES:
            yield None
            return
        with self._changed:
            kept = self._buffers.pop() if self._buffers else None
        if kept is None:
            kept = fresh_bytes(self._buffer_bytes)
        yield kept
        with self._changed:
            self._buffers.append(kept)


def _jobs(checkpoint: DistCheckpoint, copy: Copy) -> list[StoredPiece | None]:
    """The pieces to copy, each by itself; or [None]: the whole tensor at once."""
    pieces = list(checkpoint.pieces(copy.key))
    columns = checkpoint.tensors[copy.key].shape[1:]
    if all(piece.sizes[1:] == columns or (len(columns) == 1 and piece.sizes[0] <= _FEW_ROWS) for piece in pieces):
        return list(pieces)
    return [None]


def _copy(checkpoint: DistCheckpoint, copy: Copy, piece: StoredPiece | None, memory: _Memory) -> None:
    stored = checkpoint.tensors[copy.key]
    if piece is None:
        with memory.take(stored.num_bytes), memory.buffer(0) as buffer:
            _scatter(copy, stored.shape, (0,) * len(stored.shape), checkpoint.read(copy.key, buffer))
        return
    with memory.take(piece.payload_bytes), memory.buffer(piece.payload_bytes) as buffer:
        _scatter(copy, stored.shape, piece.offsets, checkpoint.read_piece(piece, buffer))


def _scatter(copy: Copy, shape: tuple[int, ...], offsets: tuple[int, ...], box: torch.Tensor) -> None:
    """Writes the numbers of a box to their places.  box: what is at `offsets` of the stored tensor."""
    width, first_row = prod(shape[1:]), offsets[0]
    is_wide = tuple(box.shape[1:]) == shape[1:]
    # Of a box that has not all columns: where each of its rows begins in the tensor's row, and how long it is.
    column = 0
    for offset, size in zip(offsets[1:], shape[1:], strict=True):
        column = column * size + offset
    for rows in copy.rows:
        start, stop = max(first_row, rows.start), min(first_row + box.shape[0], rows.start + rows.count)
        if start >= stop:
            continue
        hf_start = (rows.hf_start + start - rows.start) * width
        part = box[start - first_row : stop - first_row]
        if is_wide:
            for chunk_start, chunk in _chunks(part.reshape(-1), copy.dtype):
                copy.files[rows.name].write(rows.name, hf_start + chunk_start, chunk)
        else:
            for number, row in enumerate(part):
                copy.files[rows.name].write(
                    rows.name, hf_start + number * width + column, row.to(copy.dtype).contiguous()
                )


def _chunks(flat: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """The numbers converted to the dtype, in chunks: (first number, numbers)."""
    if flat.dtype == dtype:
        yield 0, flat
        return
    for number, chunk in enumerate(flat.split(_CHUNK_BYTES // dtype.itemsize)):
        yield number * (_CHUNK_BYTES // dtype.itemsize), chunk.to(dtype)
