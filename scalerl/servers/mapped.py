"""Memory of one process that others on its machine map: trainer ranks write buckets of weights, SGLang reads them.

It has no file name: a killed run leaves none of it. It is mapped once and then used for all syncs, because new pages
cost far more than a copy: the kernel clears each of them, and a virtual machine fetches them from its host first.

`load` runs inside SGLang (`--custom-weight-loader`); this module imports nothing that a server does not have.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import pickle
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# Of a process that reads: path -> memory. A trainer has one; that of a trainer before it is let go.
_attached: dict[str, MappedBytes] = {}


class Entry(Protocol):
    """One tensor of a bucket. start_idx, end_idx: bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int


class MappedBytes:
    """flat: uint8 [bytes], shared by every process that has it. Freed when the last of them ends or lets it go."""

    def __init__(self, descriptor: int, num_bytes: int, path: str) -> None:
        self.path = path
        stat = os.fstat(descriptor)
        self.identity = (stat.st_dev, stat.st_ino)
        # The tensor keeps the map, and the map keeps the memory.
        self.flat = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)

    @classmethod
    def allocate(cls, num_bytes: int) -> MappedBytes:
        """All pages are there when it returns."""
        descriptor = os.memfd_create("scalerl-weights", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            memory = cls(descriptor, num_bytes, f"/proc/{os.getpid()}/fd/{descriptor}")
        except BaseException:
            os.close(descriptor)
            raise
        # Others find it by this descriptor.
        weakref.finalize(memory, os.close, descriptor)
        return memory

    @classmethod
    def attach(cls, path: str, num_bytes: int) -> MappedBytes:
        """path: of the memory that another process allocated and still has."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor, num_bytes, path)
        finally:
            os.close(descriptor)

    def views(self, entries: Sequence[Entry], offset: int = 0) -> list[tuple[str, Tensor]]:
        """The tensors of a bucket that begins at that byte."""
        return [
            (
                entry.name,
                self.flat[offset + entry.start_idx : offset + entry.end_idx].view(entry.dtype).view(entry.shape),
            )
            for entry in entries
        ]


@dataclass(frozen=True)
class Place:
    """Where a bucket lies: `entries`, from that byte of the memory on."""

    memory: MappedBytes
    offset: int
    entries: Sequence[Entry]

    def serialize(self) -> str:
        """Base64 text for `RolloutClient.update_weights` with load_format=MAPPED_LOADER; holds no values.

        SGLang hands a loader (name, tensor) pairs, unpickled by an allow-list: the handle is the name of an empty
        tensor.
        """
        handle = {
            "path": self.memory.path,
            "identity": self.memory.identity,
            "num_bytes": self.memory.flat.numel(),
            "tensors": [
                (entry.name, str(entry.dtype).removeprefix("torch."), list(entry.shape), self.offset + entry.start_idx)
                for entry in self.entries
            ],
        }
        return base64.b64encode(pickle.dumps([(json.dumps(handle), _Empty())])).decode("ascii")


class _Empty:
    """Unpickled as an empty tensor, by names that SGLang's allow-list has."""

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.ByteTensor, ()


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """SGLang's loader, for a model of its own, of a bucket that `Place.serialize` names."""
    for handle, _ in named_tensors:
        model.load_weights(read(json.loads(handle)))


def read(handle: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Views of the bucket's tensors. Raises OSError where the process that has the memory is gone."""
    path, identity = handle["path"], tuple(handle["identity"])
    memory = _attached.get(path)
    if memory is None or memory.identity != identity:
        _attached.clear()
        memory = MappedBytes.attach(path, handle["num_bytes"])
        if memory.identity != identity:
            raise FileNotFoundError(f"{path} is not the memory of the trainer that sent these weights: it has ended")
        _attached[path] = memory
    named = []
    for name, dtype_name, shape, start in handle["tensors"]:
        dtype = getattr(torch, dtype_name)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        named.append((name, memory.flat[start : start + num_bytes].view(dtype).view(shape)))
    return named
