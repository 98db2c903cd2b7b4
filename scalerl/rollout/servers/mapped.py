"""Memory shared between processes of a machine, where trainer ranks write buckets of weights and servers read them.

It has no file name, so a killed run leaves nothing behind. It is mapped once and used for all syncs, because new pages
cost far more than a copy: the kernel clears each, and a virtual machine first gets them from its host.

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
from typing import Any

import torch
from torch import Tensor

# Memory that this process reads, by path. There is one per trainer; that of an earlier trainer is dropped.
_attached: dict[str, MappedBytes] = {}


@dataclass
class BucketEntry:
    """One tensor of a bucket, pickled under the name of sglang's FlattenedTensorMetadata, whose fields it has.

    start_idx, end_idx, numel: offsets and size in bytes.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class MappedBytes:
    """Bytes that processes share, freed when the last process ends or drops them.  flat: uint8 [bytes]."""

    def __init__(self, descriptor: int, num_bytes: int, path: str) -> None:
        self.path = path
        stat = os.fstat(descriptor)
        self.identity = (stat.st_dev, stat.st_ino)
        # The tensor keeps the map alive, and the map keeps the memory.
        self.flat = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)

    @classmethod
    def allocate(cls, num_bytes: int) -> MappedBytes:
        """Allocates memory, all pages of which exist when this returns."""
        descriptor = os.memfd_create("scalerl-weights", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            memory = cls(descriptor, num_bytes, f"/proc/{os.getpid()}/fd/{descriptor}")
        except BaseException:
            os.close(descriptor)
            raise
        # Other processes open it by this descriptor.
        weakref.finalize(memory, os.close, descriptor)
        return memory

    @classmethod
    def attach(cls, path: str, num_bytes: int) -> MappedBytes:
        """Maps memory that another process has allocated and still holds, by its path."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor, num_bytes, path)
        finally:
            os.close(descriptor)

    def views(self, entries: Sequence[BucketEntry], offset: int = 0) -> list[tuple[str, Tensor]]:
        """The tensors of a bucket that begins at byte `offset`."""
        return bucket_views(self.flat, entries, offset)


@dataclass(frozen=True)
class BucketPlace:
    """The place of a bucket: `entries`, from byte `offset` of the memory on."""

    memory: MappedBytes
    offset: int
    entries: Sequence[BucketEntry]

    def handle(self) -> str:
        """The place as JSON text, without values, which `read` takes once it is parsed."""
        handle = {
            "path": self.memory.path,
            "identity": self.memory.identity,
            "num_bytes": self.memory.flat.numel(),
            "tensors": [
                (entry.name, str(entry.dtype).removeprefix("torch."), list(entry.shape), self.offset + entry.start_idx)
                for entry in self.entries
            ],
        }
        return json.dumps(handle)

    def serialize(self) -> str:
        """The handle as base64 text for SGLang's update of weights with MAPPED_LOADER.

        SGLang passes (name, tensor) pairs to a loader, unpickled by an allow-list, so the handle is the name of an
        empty tensor.
        """
        return base64.b64encode(pickle.dumps([(self.handle(), _Empty())])).decode("ascii")


class _Empty:
    """An object that is unpickled as an empty tensor, by names in SGLang's allow-list."""

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.ByteTensor, ()


def bucket_views(flat: Tensor, entries: Sequence[BucketEntry], offset: int = 0) -> list[tuple[str, Tensor]]:
    """The tensors of a bucket in flat, uint8 [bytes], from byte `offset` on."""
    return [
        (entry.name, flat[offset + entry.start_idx : offset + entry.end_idx].view(entry.dtype).view(entry.shape))
        for entry in entries
    ]


def load_mapped(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Loads a bucket, given by `BucketPlace.serialize`, into SGLang's model; SGLang calls this as its loader."""
    for handle, _ in named_tensors:
        model.load_weights(read(json.loads(handle)))


def read(handle: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Views of a bucket's tensors.  Raises OSError if the process that holds the memory has ended."""
    path, identity = handle["path"], tuple(handle["identity"])
    memory = _attached.get(path)
    if memory is None or memory.identity != identity:
        _attached.clear()
        memory = MappedBytes.attach(path, handle["num_bytes"])
        if memory.identity != identity:
            raise FileNotFoundError(f"{path} is not the memory of the trainer that sent these weights: it has ended")
        _attached[path] = memory
    return views_of(memory.flat, handle["tensors"])


def views_of(flat: Tensor, tensors: Sequence[tuple[str, str, Sequence[int], int]]) -> list[tuple[str, Tensor]]:
    """Views of tensors (name, dtype, shape, first byte) in flat, uint8 [bytes]."""
    named = []
    for name, dtype_name, shape, start in tensors:
        dtype = getattr(torch, dtype_name)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        named.append((name, flat[start : start + num_bytes].view(dtype).view(torch.Size(shape))))
    return named
