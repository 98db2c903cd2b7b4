"""Reading of what `torch.save` wrote, without running it: the pickle builds inert records, numbers are read on demand.

Every name that a pickle may use is in a list here, and stands for a record, a dtype or plain Python; nothing of torch
is called. So shards of tensors that want a process group to be unpickled can be read on any machine.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from scalerl.checkpoint.errors import DamagedCheckpointError, read_error
from scalerl.checkpoint.torch_dist import as_bytes

# Bytes of a tensor that are read at a time.
MAX_READ_BYTES = 16 * 2**20
# Names of torch.distributed that describe how a tensor is spread, in all of its versions; each becomes a PickledObject.
_DESCRIPTIONS = frozenset(
    {
        "ChunkShardingSpec",
        "DTensor",
        "DTensorSpec",
        "DeviceMesh",
        "EnumerableShardingSpec",
        "MEM_FORMAT_ENCODING",
        "Partial",
        "Replicate",
        "Shard",
        "ShardMetadata",
        "ShardOrderEntry",
        "ShardedTensor",
        "ShardedTensor.ProcessGroupState",
        "ShardedTensorMetadata",
        "TensorMeta",
        "TensorProperties",
        "_FlatLayout",
        "_MeshLayout",
        "_StridedShard",
        "_remote_device",
    }
)
# Of a zip file's local header: its length, and the position of the lengths of name and extra field.
_LOCAL_HEADER_BYTES, _NAME_LENGTH_AT = 30, 26


class PickledObject:
    """An object of a pickle that is described, not made. args: of its constructor.  state: as set afterwards."""

    name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> PickledObject:
        record = super().__new__(cls)
        record.args, record.state = args, dict(kwargs)
        return record

    def __setstate__(self, state: Any) -> None:
        # With slots a state is (state, values of slots).
        parts: tuple[Any, ...] = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if all(part is None or isinstance(part, dict) for part in parts):
            self.state = {key: value for part in parts for key, value in (part or {}).items()}
        else:
            self.state = state

    def get(self, *names: str) -> Any:
        """The value of the first of these names that the state has; None where it has none."""
        if isinstance(self.state, dict):
            for name in names:
                if name in self.state:
                    return self.state[name]
        return None


@dataclass(frozen=True)
class _Storage:
    name: str
    dtype: torch.dtype


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file. start: its first number in the storage.  strides: in numbers."""

    storage: str
    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        contiguous, step = [], 1
        for size in reversed(self.shape):
            contiguous.append(step)
            step *= size
        dimensions = zip(self.shape, self.strides, reversed(contiguous), strict=True)
        return not prod(self.shape) or all(size == 1 or stride == expected for size, stride, expected in dimensions)


class TorchFile:
    """A file of `torch.save`. content: what it holds, with a FileTensor or a PickledObject where a tensor was.

    Raises DamagedCheckpointError naming the file when it is not one, or wants something that is on no list. Several
    threads may read. Use as a context manager, or call close().
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._intact: set[str] = set()
        self._lock = threading.Lock()
        try:
            self._file = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise read_error(str(self.path), error) from None
        try:
            self._members, self.content = self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> tuple[dict[str, zipfile.ZipInfo], Any]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                members = {info.filename.split("/", 1)[-1]: info for info in archive.infolist()}
                if "data.pkl" not in members:
                    raise self._damaged("has no data.pkl: torch.save did not write it")
                if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
                    raise self._damaged("was written on a machine with another order of bytes")
                text = archive.read(members["data.pkl"])
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            raise self._damaged(f"is damaged, or not what torch.save has written since 1.6: {error}") from None
        try:
            return members, _Unpickler(io.BytesIO(text)).load()
        except pickle.UnpicklingError as error:
            raise DamagedCheckpointError(f"{self.path} is refused: {error}") from None
        except (EOFError, AttributeError, IndexError, TypeError, KeyError, ValueError, ImportError) as error:
            raise self._damaged(f"is damaged: {error!r}") from None

    def stretches(self, tensor: FileTensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first number, numbers) of the tensor in memory order, a few megabytes at a time.

        The checksum of its storage is compared first. Raises DamagedCheckpointError.
        """
        self._check(tensor)
        count = prod(tensor.shape)
        if not tensor.is_contiguous:
            span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
            whole = self._numbers(tensor, 0, span if count else 0)
            yield 0, whole.as_strided(tensor.shape, tensor.strides).contiguous().view(-1)
            return
        most = max(1, MAX_READ_BYTES // tensor.dtype.itemsize)
        for first in range(0, count, most):
            yield first, self._numbers(tensor, first, min(most, count - first))

    def read(self, tensor: FileTensor) -> torch.Tensor:
        """The whole tensor, as `stretches` reads it."""
        parts = [part for _, part in self.stretches(tensor)]
        return (torch.cat(parts) if parts else torch.empty(0, dtype=tensor.dtype)).view(tensor.shape)

    def _numbers(self, tensor: FileTensor, first: int, count: int) -> torch.Tensor:
        numbers = torch.empty(count, dtype=tensor.dtype)
        self._fill(tensor.storage, (tensor.start + first) * tensor.dtype.itemsize, as_bytes(numbers))
        return numbers

    def _fill(self, storage: str, start: int, out: memoryview) -> None:
        info = self._member(storage)
        if start < 0 or start + len(out) > info.file_size:
            raise self._damaged(f"its storage {storage} has {info.file_size} bytes, {start + len(out)} are asked for")
        position = start + self._start(info)
        while out:
            size = os.preadv(self._file, [out], position)
            if not size:
                raise self._damaged(f"is cut short at {position} bytes")
            out, position = out[size:], position + size

    def _check(self, tensor: FileTensor) -> None:
        with self._lock:
            if tensor.storage in self._intact:
                return
        info = self._member(tensor.storage)
        checksum, buffer = 0, torch.empty(MAX_READ_BYTES, dtype=torch.uint8)
        for start in range(0, info.file_size, MAX_READ_BYTES):
            part = as_bytes(buffer)[: min(MAX_READ_BYTES, info.file_size - start)]
            self._fill(tensor.storage, start, part)
            checksum = zlib.crc32(part, checksum)
        if checksum != info.CRC:
            raise self._damaged(f"the bytes of its storage {tensor.storage} are not those that were saved")
        with self._lock:
            self._intact.add(tensor.storage)

    def _member(self, storage: str) -> zipfile.ZipInfo:
        info = self._members.get(f"data/{storage}")
        if info is None or info.compress_type != zipfile.ZIP_STORED:
            raise self._damaged(f"has no storage {storage}")
        return info

    def _start(self, info: zipfile.ZipInfo) -> int:
        header = os.pread(self._file, _LOCAL_HEADER_BYTES, info.header_offset)
        lengths = (int.from_bytes(header[i : i + 2], "little") for i in (_NAME_LENGTH_AT, _NAME_LENGTH_AT + 2))
        return info.header_offset + _LOCAL_HEADER_BYTES + sum(lengths)

    def _damaged(self, what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self.path}: {what}")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _tensor(storage: _Storage, start: int, shape: Any, strides: Any, *_: Any) -> FileTensor:
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor has no storage")
    return FileTensor(storage.name, storage.dtype, int(start), tuple(map(int, shape)), tuple(map(int, strides)))


def _same(data: Any, *_: Any) -> Any:
    return data


def _joined(*parts: Any) -> str:
    return "/".join(str(part) for part in parts)


def _member(*_: Any) -> type[PickledObject]:
    return PickledObject


def _wrapper(kind: Any, dtype: Any, shape: Any, *_: Any) -> PickledObject:
    record = kind()
    record.args = (tuple(shape), dtype)
    return record


def _with_state(function: Any, kind: Any, args: Any, state: Any) -> Any:
    value = function(*args)
    if isinstance(value, PickledObject):
        value.__setstate__(state)
    return value


_FUNCTIONS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): _same,
    ("torch", "device"): _joined,
    ("torch.serialization", "_get_layout"): _joined,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _same,
    ("torch._utils", "_rebuild_wrapper_subclass"): _wrapper,
    ("torch._tensor", "_rebuild_from_type_v2"): _with_state,
    # A member of an enumeration or of a class; which member is of no use here.
    ("builtins", "getattr"): _member,
    ("__builtin__", "getattr"): _member,
}
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module in ("torch", "torch.cuda") and name in _STORAGES:
            return _STORAGES[name]
        if module.startswith("torch.distributed.") and name in _DESCRIPTIONS:
            return type(name, (PickledObject,), {"name": name})
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a file of tensors")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, name, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(name, str):
            raise pickle.UnpicklingError(f"{kind!r} is no storage of a tensor")
        return _Storage(name, dtype)
