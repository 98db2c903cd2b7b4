"""A rank's share of a checkpoint in host memory: copied before the next update, written while the run goes on."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from scalerl.checkpoint.pieces import Piece

# Each piece begins at a multiple of this: what any vectorised copy wants.
_ALIGN_BYTES = 64


class HostCopy:
    """Host memory for the pieces that a rank saves, of their size and no more; kept from one save to the next."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def copy_pieces(self, pieces: Iterable[Piece], ready: torch.cuda.Event | None = None) -> list[Piece]:
        """Copies the pieces to host memory. The copies stay until the next call.

        ready: of pieces on a GPU, from when on they are what is to be copied; the copies have a stream of their own.
        """
        taken = list(pieces)
        sizes = (-(-piece.tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for piece in taken)
        starts = list(itertools.accumulate(sizes, initial=0))
        self._reserve(starts[-1], pin=ready is not None)
        copies = []
        with _own_stream(ready):
            for piece, start in zip(taken, starts, strict=False):
                memory = self._memory[start : start + piece.tensor.nbytes]
                host = memory.view(piece.tensor.dtype).view(piece.tensor.shape)
                host.copy_(piece.tensor.detach(), non_blocking=True)
                copies.append(replace(piece, tensor=host))
        return copies

    def release(self) -> None:
        """Releases the memory; the pieces that were taken are then gone."""
        if self._pinned:
            _cuda_runtime().cudaHostUnregister(self._memory.data_ptr())
        self._memory, self._pinned = torch.empty(0, dtype=torch.uint8), False

    def _reserve(self, num_bytes: int, *, pin: bool) -> None:
        if num_bytes <= len(self._memory):
            return
        self.release()
        memory = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # The first copy would else wait for each page of 4 KiB by itself.
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        if pin:
            # torch's own pinned memory comes in powers of two. Where it is refused the copies are slower, no more.
            self._pinned = int(_cuda_runtime().cudaHostRegister(self._memory.data_ptr(), num_bytes, 0)) == 0


@contextmanager
def _own_stream(ready: torch.cuda.Event | None) -> Iterator[None]:
    """Runs the block's work for the GPU after `ready`, beside the other streams, and waits for it."""
    if ready is None:
        yield
        return
    with torch.cuda.device(ready.device):
        stream = torch.cuda.Stream()
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()
