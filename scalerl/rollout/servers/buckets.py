"""Buckets of weights on their way to rollout servers: laid out end to end, in memory that a server reads, and as text.

On a CPU trainer ranks write buckets into memory that servers of the machine map (`MappedBytes`). It has no file name,
so a killed run leaves nothing behind. It is mapped once and used for all syncs, because new pages cost far more than a
copy: the kernel clears each, and a virtual machine first gets them from its host. On a GPU a server opens memory of the
device by CUDA IPC.

`load_mapped` runs inside SGLang (`--custom-weight-loader`). On a CPU no trainer rank imports sglang, which would take
5 s and 350 MB in each: texts for it are written in its pickle format.
"""

from __future__ import annotations

import base64
import copyreg
import io
import json
import math
import mmap
import os
import pickle
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from scalerl.base.device_allocator import outside_of_expandable_segments
from scalerl.errors import UserError

NamedTensors = Sequence[tuple[str, Tensor]]

# In bytes, as the widest dtype, complex128, has 16.
BUCKET_ALIGNMENT = 16
SHARED_MEMORY_DIR = "/dev/shm"
# Memory that this process reads, by path. There is one per trainer; that of an earlier trainer is dropped.
_attached: dict[str, MappedBytes] = {}
# Guards torch's sharing strategy, which is one for the whole process.
_sharing = threading.Lock()


@dataclass(frozen=True)
class Bucket:
    """A bucket of weights.

    named: (HF name, tensor).  shared: their place in memory that servers of this machine map; None: they are elsewhere.
    by_value: its text has the values, for a server that may be on another machine.
    """

    named: NamedTensors
    shared: BucketPlace | None = None
    by_value: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.named)

    @property
    def is_mapped(self) -> bool:
        """Whether its text names memory that the server maps, and has no values."""
        return self.shared is not None


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

    def described(self, offset: int) -> tuple[str, str, list[int], int]:
        """Name, dtype, shape and first byte of the tensor in memory where its bucket begins at `offset`."""
        return self.name, str(self.dtype).removeprefix("torch."), list(self.shape), offset + self.start_idx


def flat_layout(tensors: Sequence[tuple[str, torch.Size, torch.dtype]]) -> tuple[list[BucketEntry], int]:
    """Lays out tensors (name, shape, dtype) end to end, aligned for every dtype; returns entries and size in bytes."""
    entries, start = [], 0
    for name, shape, dtype in tensors:
        num_bytes = math.prod(shape) * dtype.itemsize
        entries.append(BucketEntry(name, torch.Size(shape), dtype, start, start + num_bytes, num_bytes))
        start += -(-num_bytes // BUCKET_ALIGNMENT) * BUCKET_ALIGNMENT
    return entries, start


def bucket_views(flat: Tensor, entries: Sequence[BucketEntry], offset: int = 0) -> list[tuple[str, Tensor]]:
    """The tensors of a bucket in flat, uint8 [bytes], from byte `offset` on."""
    return views_of(flat, [entry.described(offset) for entry in entries])


def views_of(flat: Tensor, tensors: Sequence[tuple[str, str, Sequence[int], int]]) -> list[tuple[str, Tensor]]:
    """Views of tensors (name, dtype, shape, first byte) in flat, uint8 [bytes]."""
    named = []
    for name, dtype_name, shape, start in tensors:
        dtype = getattr(torch, dtype_name)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        named.append((name, flat[start : start + num_bytes].view(dtype).view(torch.Size(shape))))
    return named


# --- memory that servers of the machine map ---


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
        """The place as JSON text, without values, which `read_mapped` takes once it is parsed."""
        handle = {
            "path": self.memory.path,
            "identity": self.memory.identity,
            "num_bytes": self.memory.flat.numel(),
            "tensors": [entry.described(self.offset) for entry in self.entries],
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


def load_mapped(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Loads a bucket, given by `BucketPlace.serialize`, into SGLang's model; SGLang calls this as its loader."""
    for handle, _ in named_tensors:
        model.load_weights(read_mapped(json.loads(handle)))


def read_mapped(handle: dict[str, Any]) -> list[tuple[str, Tensor]]:
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


# --- memory of a device, or of torch's shared memory ---


def cuda_handle(flat: Tensor, entries: Sequence[BucketEntry]) -> str:
    """A handle of a bucket in device memory as JSON text; `read_cuda` opens it once, in another process.

    flat: uint8 [bytes] on CUDA, outside of expandable segments; it lives until the other process drops it.
    """
    # device, handle, bytes, offset, then the counter and the event by which both processes know who is done.
    _, *shared = flat.untyped_storage()._share_cuda_()
    handle = {
        "gpu": _uuid(flat.device),
        "storage": [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in shared],
        "tensors": [entry.described(0) for entry in entries],
    }
    return json.dumps(handle)


def read_cuda(handle: dict[str, Any], device: torch.device) -> list[tuple[str, Tensor]]:
    """Views of a bucket's tensors on this process's GPU.  Raises ValueError for a handle of another GPU."""
    if _uuid(device) != handle["gpu"]:
        raise ValueError(f"the weights are on GPU {handle['gpu']}, this server runs on GPU {_uuid(device)}")
    shared = [base64.b64decode(part) if isinstance(part, str) else part for part in handle["storage"]]
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *shared)
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return views_of(flat, handle["tensors"])


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def flat_bucket(named_tensors: NamedTensors) -> tuple[Tensor, list[BucketEntry]]:
    """Copies tensors into uint8 [bytes], on a CPU in shared memory; returns it and its entries."""
    entries, num_bytes = flat_layout([(name, tensor.shape, tensor.dtype) for name, tensor in named_tensors])
    flat = _memory_for_a_server(num_bytes, named_tensors[0][1].device)
    _fill(flat, entries, named_tensors)
    return flat, entries


def _fill(flat: Tensor, entries: Sequence[BucketEntry], named_tensors: NamedTensors) -> None:
    for (_, view), (_, tensor) in zip(bucket_views(flat, entries), named_tensors, strict=True):
        view.copy_(tensor.detach())


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


# --- in sglang's pickle format ---


# The pickler that is written in Python, whose methods can be overridden; it has no types.
_PythonPickler: Any = vars(pickle)["_Pickler"]


class _SglangPickler(_PythonPickler):
    """Pickles `BucketEntry` as the class of sglang, and tensors by shared memory, as torch does, or by value."""

    def __init__(self, file: io.BytesIO, *, by_value: bool = False) -> None:
        super().__init__(file, protocol=pickle.DEFAULT_PROTOCOL)
        shared = {} if by_value else vars(ForkingPickler)["_extra_reducers"]
        self.dispatch_table = {**copyreg.dispatch_table, **shared}

    def reducer_override(self, obj: Any) -> Any:
        # A function's name is saved by `save_global` too, which the class's table of types passes over.
        return obj.__name__ if isinstance(obj, FunctionType) else NotImplemented

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj is BucketEntry:
            module, name = "sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"
        elif obj is vars(torch.storage)["_load_from_bytes"]:
            # Megatron puts its own function there, which sglang does not know.
            module, name = "torch.storage", "_load_from_bytes"
        else:
            super().save_global(obj, name)
            return
        self.save(module)
        self.save(name)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)


def flattened_text(named_tensors: NamedTensors) -> str:
    """Copies tensors into memory that a server opens, and returns its handle as text in sglang's format."""
    return _sglang_text(*flat_bucket(named_tensors))


def text_of_values(named_tensors: NamedTensors) -> str:
    """Tensors with their values as text in sglang's format, which a server on another machine can read too."""
    entries, num_bytes = flat_layout([(name, tensor.shape, tensor.dtype) for name, tensor in named_tensors])
    flat = torch.empty(num_bytes, dtype=torch.uint8)
    _fill(flat, entries, named_tensors)
    return _text(_dumped({"flattened_tensor": flat, "metadata": entries}, by_value=True))


def _sglang_text(flat: Tensor, entries: Sequence[BucketEntry]) -> str:
    if flat.is_cuda:
        # Names the device by its UUID, as sender and server may see devices in different orders.
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
    return _text(_dump({"flattened_tensor": flat, "metadata": list(entries)}))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _dumped(content: Any, *, by_value: bool = False) -> bytes:
    file = io.BytesIO()
    _SglangPickler(file, by_value=by_value).dump(content)
    return file.getvalue()


def _dump(content: Any) -> bytes:
    with _sharing:
        # The other strategy passes file descriptors over a socket that only related processes can open.
        strategy = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            return _dumped(content)
        finally:
            torch.multiprocessing.set_sharing_strategy(strategy)
