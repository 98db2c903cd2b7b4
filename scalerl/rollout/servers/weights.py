"""Buckets of weights for rollout servers, and their serialization; `checksums` proves that they arrived.

On a CPU sglang is not imported, which would take 5 s and 350 MB in every trainer rank: the payload is written in its
pickle format.
"""

from __future__ import annotations

import base64
import copyreg
import io
import math
import os
import pickle
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from scalerl.base.device_allocator import outside_of_expandable_segments
from scalerl.errors import UserError
from scalerl.rollout.servers.checksums import ExpectedChecksums, checksum_differences, tensor_checksum
from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.servers.mapped import BucketEntry, BucketPlace, bucket_views

__all__ = [
    "Bucket",
    "ExpectedChecksums",
    "checksum_differences",
    "expected_checksums",
    "flat_layout",
    "serialize_bucket",
    "tensor_checksum",
]

NamedTensors = Sequence[tuple[str, Tensor]]

# In bytes, as the widest dtype, complex128, has 16.
BUCKET_ALIGNMENT = 16
SHARED_MEMORY_DIR = "/dev/shm"
# Guards torch's sharing strategy, which is one for the whole process.
_sharing = threading.Lock()


# The pickler that is written in Python, whose methods can be overridden; it has no types.
_PythonPickler: Any = vars(pickle)["_Pickler"]


class _SglangPickler(_PythonPickler):
    """Pickles tensors by shared memory (as torch.multiprocessing does), and `BucketEntry` as sglang's class."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.DEFAULT_PROTOCOL)
        self.dispatch_table = {**copyreg.dispatch_table, **vars(ForkingPickler)["_extra_reducers"]}

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj is not BucketEntry:
            super().save_global(obj, name)
            return
        self.save("sglang.srt.weight_sync.tensor_bucket")
        self.save("FlattenedTensorMetadata")
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)


def flat_layout(tensors: Sequence[tuple[str, torch.Size, torch.dtype]]) -> tuple[list[BucketEntry], int]:
    """Lays out tensors (name, shape, dtype) end to end, aligned for every dtype; returns entries and size in bytes."""
    entries, start = [], 0
    for name, shape, dtype in tensors:
        num_bytes = math.prod(shape) * dtype.itemsize
        entries.append(BucketEntry(name, torch.Size(shape), dtype, start, start + num_bytes, num_bytes))
        start += -(-num_bytes // BUCKET_ALIGNMENT) * BUCKET_ALIGNMENT
    return entries, start


@dataclass(frozen=True)
class Bucket:
    """A bucket of weights.

    named: (HF name, tensor).  shared: their place in memory that servers of this machine map; None: they are elsewhere.
    """

    named: NamedTensors
    shared: BucketPlace | None = None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.named)

    @property
    def is_mapped(self) -> bool:
        """Whether its text names memory that the server maps, and has no values."""
        return self.shared is not None


def serialize_bucket(named_tensors: NamedTensors, engine: str) -> str:
    """A bucket as text for `RolloutClient.update_weights`; to be called once per server rank.  engine: its name."""
    if not named_tensors:
        raise ValueError("serialize_bucket: an empty bucket; send only buckets with tensors")
    return ENGINES[engine].serialize(Bucket(named_tensors))


def expected_checksums(
    named_tensors: Iterable[tuple[str, Tensor]],
    model_config: Mapping[str, Any],
    tp_size: int,
    engine: str,
    dtype: torch.dtype | None = None,
    *,
    engine_kwargs: Mapping[str, Any] | None = None,
) -> list[dict[str, str]]:
    """The expected checksums (`Engine.expected_checksums`) of all tensors of a model, per engine rank."""
    expected = ENGINES[engine].expected_checksums(model_config, tp_size, dtype, engine_kwargs=engine_kwargs)
    expected.add(named_tensors)
    return expected.result()


def flattened_text(named_tensors: NamedTensors) -> str:
    """Copies tensors into memory that a server opens, and returns its handle as text in sglang's format."""
    return _sglang_text(*flat_bucket(named_tensors))


def flat_bucket(named_tensors: NamedTensors) -> tuple[Tensor, list[BucketEntry]]:
    """Copies tensors into uint8 [bytes], on a CPU in shared memory; returns it and its entries."""
    entries, num_bytes = flat_layout([(name, tensor.shape, tensor.dtype) for name, tensor in named_tensors])
    flat = _memory_for_a_server(num_bytes, named_tensors[0][1].device)
    for (_, view), (_, tensor) in zip(bucket_views(flat, entries), named_tensors, strict=True):
        view.copy_(tensor.detach())
    return flat, entries


def shared_bytes(num_bytes: int) -> Tensor:
    """Allocates uint8 [bytes] in shared memory, which a server opens by file name; freed with its last user.

    Raises UserError if the machine has too little, since writing to it would kill the process.
    """
    stat = os.statvfs(SHARED_MEMORY_DIR)
    if stat.f_bavail * stat.f_frsize < num_bytes:
        raise UserError(
            f"weight sync needs {num_bytes / 2**20:.0f} MiB of shared memory, {SHARED_MEMORY_DIR} has "
            f"{stat.f_bavail * stat.f_frsize / 2**20:.0f} MiB free; set a smaller "
            "actor_rollout_ref.rollout.update_weights_bucket_megabytes (a bucket holds at least the largest "
            f"tensor), or enlarge {SHARED_MEMORY_DIR} (docker run --shm-size)"
        )
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_using_filename_cpu(num_bytes))


def _memory_for_a_server(num_bytes: int, device: torch.device) -> Tensor:
    """Allocates uint8 [bytes] on the device that a server can open, on a CPU in shared memory."""
    if device.type != "cuda":
        return shared_bytes(num_bytes)
    with outside_of_expandable_segments():
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _sglang_text(flat: Tensor, entries: Sequence[BucketEntry]) -> str:
    if flat.is_cuda:
        # Names the device by its UUID, as sender and server may see devices in different orders.
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
    return base64.b64encode(_dump({"flattened_tensor": flat, "metadata": list(entries)})).decode("ascii")


def _dump(content: Any) -> bytes:
    file = io.BytesIO()
    with _sharing:
        # The other strategy passes file descriptors over a socket that only related processes can open.
        strategy = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            _SglangPickler(file).dump(content)
        finally:
            torch.multiprocessing.set_sharing_strategy(strategy)
    return file.getvalue()
