"""A rank's share of a checkpoint in host memory: copied at a step boundary, written while the next step runs."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable
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

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Copies the pieces as they are now to host memory. The copies stay until the next call."""
        taken = list(pieces)
        sizes = (-(-piece.tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for piece in taken)
        starts = list(itertools.accumulate(sizes, initial=0))
        is_cuda = any(piece.tensor.is_cuda for piece in taken)
        self._reserve(starts[-1], pin=is_cuda)
        copies = []
        for piece, start in zip(taken, starts, strict=False):
            memory = self._memory[start : start + piece.tensor.nbytes]
            host = memory.view(piece.tensor.dtype).view(piece.tensor.shape)
            host.copy_(piece.tensor.detach(), non_blocking=True)
            copies.append(replace(piece, tensor=host))
        if is_cuda:
            # The copies run behind Python's back: only now the weights may change.
            torch.cuda.synchronize()
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


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()
