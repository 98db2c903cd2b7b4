"""Copying of a checkpoint's numbers into Hugging Face files, by several threads, a few rows at a time.

Each Hugging Face tensor consists of rows of one stored tensor (`Param.rows_of`). Rows are read from the pieces that
hold them, checked, put together where columns are split, converted if another dtype is asked for, and written, all
while a processor's cache has them: memory is passed once, and no tensor is ever whole in it. Stacked experts, whose
rows are columns in the file, are whole in memory one by one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from scalerl.checkpoint.pieces import CACHED_BYTES, StoredPiece
from scalerl.checkpoint.torch_dist import DistCheckpoint, PieceReader, box_view, intersection
from scalerl.merge.writer import SafetensorsFile, check_fits
from scalerl.models import RowRange

MAX_WORKERS = 8


@dataclass(frozen=True)
class Copy:
    """One stored tensor and where its rows go. files: by Hugging Face name.

    in_stack: of an expert in a stacked Hugging Face tensor, which has no rows of it: from the whole tensor to its part.
    """

    key: str
    rows: Sequence[RowRange]
    files: Mapping[str, SafetensorsFile]
    dtype: torch.dtype
    in_stack: Callable[[torch.Tensor], StackPart] | None = None


@dataclass(frozen=True)
class StackPart:
    """Numbers of a stacked Hugging Face tensor from number `start` on."""

    name: str
    start: int
    numbers: torch.Tensor


def copy_all(checkpoint: DistCheckpoint, wanted: Sequence[Copy], num_workers: int | None = None) -> None:
    """Makes all copies, by several threads; raises the exception of a copy that failed.

    Memory: a few megabytes for each thread, or the pieces of a tensor that have no index, which are whole in memory.
    """
    # The largest first, so that no thread waits for one of them in the end.
    jobs = sorted(
        (job for copy in wanted for job in _jobs(checkpoint, copy)),
        key=lambda job: -sum(piece.payload_bytes for piece in job.pieces),
    )
    run_all([partial(_run, checkpoint, job) for job in jobs], num_workers)


def run_all(calls: Sequence[Callable[[], None]], num_workers: int | None) -> None:
    """Makes the calls in order, by several threads (None: as many as cores, at most 8); raises the first exception."""
    num_workers = num_workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    torch_threads = torch.get_num_threads()
    try:
        # The threads share the cores: torch would start as many for each of them to copy a megabyte.
        with ThreadPoolExecutor(num_workers, "merge", torch.set_num_threads, (1,)) as pool:
            waiting = [pool.submit(call) for call in calls]
            done, others = wait(waiting, return_when=FIRST_EXCEPTION)
            for future in others:
                future.cancel()
    finally:
        torch.set_num_threads(torch_threads)
    for future in done:
        future.result()


@dataclass(frozen=True)
class _Job:
    """The rows [first, last) of a stored tensor, and the pieces that hold these rows and no others."""

    copy: Copy
    pieces: Sequence[StoredPiece]
    first: int
    last: int


def _jobs(checkpoint: DistCheckpoint, copy: Copy) -> Iterator[_Job]:
    """Splits a tensor into as many jobs as its pieces allow."""
    members: list[StoredPiece] = []
    first = last = 0
    for piece in sorted(checkpoint.pieces(copy.key), key=lambda piece: piece.offsets):
        if members and piece.offsets[0] >= last and copy.in_stack is None:
            yield _Job(copy, members, first, last)
            members, first = [], last
        members.append(piece)
        last = max(last, piece.offsets[0] + piece.sizes[0])
    yield _Job(copy, members, first, last)


def _run(checkpoint: DistCheckpoint, job: _Job) -> None:
    """Copies the rows of a job in their order, a few at a time, and compares the digests of its pieces."""
    stored = checkpoint.tensors[job.copy.key]
    columns = stored.shape[1:]
    row_bytes = prod(columns) * max(stored.dtype.itemsize, job.copy.dtype.itemsize)
    step = max(1, CACHED_BYTES // row_bytes) if job.copy.in_stack is None else job.last
    buffer = torch.empty((min(step, job.last - job.first), *columns), dtype=job.copy.dtype)
    readers = [(piece, PieceReader(checkpoint, piece)) for piece in job.pieces]
    for start in range(job.first, job.last, step):
        rows = buffer[: min(step, job.last - start)]
        origin = (start, *(0 for _ in columns))
        for piece, reader in readers:
            shared = intersection((origin, tuple(rows.shape)), (piece.offsets, piece.sizes))
            if shared is not None:
                reader.read_into(box_view(rows, shared, origin))
        check_fits(job.copy.key, rows, stored.dtype)
        _write(job.copy, start, rows)
    for _, reader in readers:
        reader.finish()


def _write(copy: Copy, first: int, box: torch.Tensor) -> None:
    """Writes whole rows of the stored tensor, from row `first` on, to their places."""
    if copy.in_stack is not None:
        part = copy.in_stack(box)
        copy.files[part.name].write(part.name, part.start, part.numbers)
        return
    width = prod(box.shape[1:])
    for rows in copy.rows:
        start, stop = max(first, rows.start), min(first + box.shape[0], rows.start + rows.count)
        if start < stop:
            hf_start = (rows.hf_start + start - rows.start) * width
            copy.files[rows.name].write(rows.name, hf_start, box[start - first : stop - first])
