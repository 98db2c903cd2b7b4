"""Writing of a model directory, whole or not at all: safetensors by several threads, in any order.

Format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from secrets import token_hex
from types import TracebackType

import torch

from scalerl.base.files import Writeback, flush, fsync, reserve
from scalerl.checkpoint.pieces import TensorSpec, as_bytes
from scalerl.models import LazyTensor
from scalerl.models.block_scales import STORED_DTYPE
from scalerl.models.weights import INDEX_NAME

# Of merged models.
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_NAMES = DTYPE_NAMES | {torch.float8_e4m3fn: STORED_DTYPE}


class SafetensorsFile:
    """One file whose header is written first; numbers follow at their places, so none is kept in memory."""

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        self.specs = dict(specs)
        # Numbers of each tensor that are still to come.
        self._remaining = {name: prod(spec.shape) for name, spec in specs.items()}
        self._counting = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._writeback = Writeback(self._file)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        offset = 0
        for name, spec in specs.items():
            end = offset + spec.num_bytes
            header[name] = {"dtype": _NAMES[spec.dtype], "shape": spec.shape, "data_offsets": [offset, end]}
            self._starts[name] = offset
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data_start = 8 + len(text)
        reserve(self._file, self._data_start + offset)
        self._put(len(text).to_bytes(8, "little") + text, 0)

    def write(self, name: str, start: int, numbers: torch.Tensor) -> None:
        """Writes the tensor's numbers from number `start` on.  numbers: contiguous, of the tensor's dtype."""
        spec = self.specs[name]
        assert numbers.dtype == spec.dtype and start + numbers.numel() <= prod(spec.shape), (name, numbers.dtype)
        self._put(as_bytes(numbers), self._data_start + self._starts[name] + start * spec.dtype.itemsize)
        with self._counting:
            self._remaining[name] -= numbers.numel()
        self._writeback.written(numbers.nbytes)

    def _put(self, data: memoryview | bytes, position: int) -> None:
        while data:
            size = os.pwrite(self._file, data, position)
            data, position = data[size:], position + size

    def close(self) -> None:
        """Forces the file onto the disk and closes it; every number must have been written."""
        assert not any(self._remaining.values()), (
            f"not written as a whole: {[name for name, n in self._remaining.items() if n]}"
        )
        os.fsync(self._file)
        os.close(self._file)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            os.close(self._file)


def check_fits(key: str, numbers: torch.Tensor, stored: torch.dtype) -> None:
    """Raises ValueError where numbers converted from dtype `stored` became infinite, as in float16 above 65504.

    key: the stored tensor's.  Not where nothing can: bfloat16 and float32 have the same range.
    """
    if numbers.dtype == torch.float16 != stored and bool(numbers.isinf().any()):
        raise ValueError(f"{key} has numbers that are too large for float16 (65504); give --dtype bfloat16 or float32")


@contextmanager
def model_files(
    directory: Path,
    groups: Sequence[Mapping[str, TensorSpec]],
    max_shard_bytes: int,
    others: Mapping[str, LazyTensor] | None = None,
) -> Iterator[dict[str, SafetensorsFile]]:
    """Yields the open file of each tensor, by name, and writes the index of several files after the block.

    groups: tensors by name that share a file, in their order.  others: are copied as they are, behind the groups.
    """
    copied = others or {}
    groups = [group for group in groups if group]
    groups += [{name: TensorSpec(tuple(other.get_shape()), other[:0].dtype)} for name, other in copied.items()]
    plan = plan_files(groups, max_shard_bytes)
    files: dict[str, SafetensorsFile] = {}
    names: dict[str, str] = {}
    with ExitStack() as stack:
        for number, members in enumerate(plan):
            name = file_name(number, len(plan))
            specs = {tensor: spec for index in members for tensor, spec in groups[index].items()}
            files |= dict.fromkeys(specs, stack.enter_context(SafetensorsFile(directory / name, specs)))
            names |= dict.fromkeys(specs, name)
        yield files
        for name, other in copied.items():
            files[name].write(name, 0, other[:].contiguous())
    if len(plan) > 1:
        write_safetensors_index(directory, names, {name: spec for group in groups for name, spec in group.items()})


def plan_files(groups: Sequence[Mapping[str, TensorSpec]], max_shard_bytes: int) -> list[list[int]]:
    """Group indices of each file, in order: a file takes groups until the next would exceed max_shard_bytes."""
    files: list[list[int]] = []
    room = 0
    for index, group in enumerate(groups):
        size = sum(spec.num_bytes for spec in group.values())
        if not files or size > room:
            files.append([])
            room = max_shard_bytes
        files[-1].append(index)
        room -= size
    return files


def file_name(index: int, num_files: int) -> str:
    """Name of file `index` (from 0) as transformers writes it."""
    if num_files == 1:
        return "model.safetensors"
    return f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"


def write_safetensors_index(directory: Path, file_of: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> None:
    """Writes model.safetensors.index.json, with total_size in bytes of tensor data."""
    index = {
        "metadata": {
            "total_parameters": sum(prod(s.shape) for s in specs.values()),
            "total_size": sum(s.num_bytes for s in specs.values()),
        },
        "weight_map": dict(sorted(file_of.items())),
    }
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """Gives a directory to write to, which takes the name of `target` if the block raises nothing; it is removed
    otherwise. An existing `target` is replaced."""
    target.parent.mkdir(parents=True, exist_ok=True)
    tmp = _beside(target, "tmp")
    tmp.mkdir()
    try:
        yield tmp
        # Or a power failure could leave empty files under the name.
        flush([*tmp.rglob("*"), tmp])
        old = _beside(target, "old") if target.exists() else None
        try:
            if old is not None:
                target.rename(old)
            tmp.rename(target)
        # Ctrl-C too.
        except BaseException:
            if old is not None and old.exists() and not target.exists():
                old.rename(target)
            raise
        fsync(target.parent)
        if old is not None:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _beside(target: Path, purpose: str) -> Path:
    return target.with_name(f".{target.name}.{purpose}-{os.getpid()}-{token_hex(4)}")
