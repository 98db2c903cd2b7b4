"""The shards of an FSDP checkpoint: which part of each tensor `model_world_size_{W}_rank_{R}.pt` has.

A state dictionary has DTensors (FSDP2, and FSDP1 with a device mesh), ShardedTensors (FSDP1 without one), or whole
tensors, on meshes of one dimension or two (HSDP: replicas of shards).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from scalerl.checkpoint.torch_dist import allow_open_files
from scalerl.merge.torch_file import FileTensor, PickledObject, TorchFile

FILE_NAME = re.compile(r"model_world_size_(?P<world_size>\d+)_rank_(?P<rank>\d+)\.pt")
# Parts of names that wrappers of modules add.
_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")


@dataclass(frozen=True)
class TensorBox:
    """A box of a tensor: what is at `offsets` of the whole, in a rank's file."""

    rank: int
    tensor: FileTensor
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor as its shards.  shape: of the whole tensor.  shards: every part of it once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: list[TensorBox]


class FsdpCheckpoint:
    """The tensors of all ranks' files, by their names in the model. Use as a context manager, or call close().

    Raises ValueError: no such files, some missing, of several runs, damaged, or with anything in them but tensors.
    """

    def __init__(self, directory: str | Path) -> None:
        self.dir = Path(directory)
        paths = find_files(self.dir)
        allow_open_files(len(paths))
        with ExitStack() as opened:
            self.files = [opened.enter_context(TorchFile(path)) for path in paths]
            self.tensors = self._join([_named_values(file) for file in self.files])
            self._opened = opened.pop_all()

    def _join(self, values_by_rank: Sequence[Mapping[str, Any]]) -> dict[str, ShardedTensor]:
        names = values_by_rank[0].keys()
        for rank, values in enumerate(values_by_rank):
            if values.keys() != names:
                different = ", ".join(sorted(values.keys() ^ names)[:4])
                raise ValueError(f"{self.files[rank].path} has other tensors than rank 0's file: {different}")
        return {name: self._tensor(name, [values[name] for values in values_by_rank]) for name in names}

    def _tensor(self, name: str, values_by_rank: Sequence[Any]) -> ShardedTensor:
        shape: tuple[int, ...] | None = None
        places: dict[tuple[int, ...], TensorBox] = {}
        for rank, value in enumerate(values_by_rank):
            try:
                whole, shards = _shards(self.files[rank], rank, value)
            except ValueError as error:
                raise ValueError(f"{self.files[rank].path}: {name}: {error}") from None
            if shape not in (None, whole):
                raise ValueError(f"{self.files[rank].path}: {name} has shape {whole}, in rank 0's file {shape}")
            shape = whole
            for shard in shards:
                if prod(shard.tensor.shape):
                    places.setdefault(shard.offsets, shard)
        assert shape is not None
        distinct = list(places.values())
        inside = all(
            start + size <= length
            for shard in distinct
            for start, size, length in zip(shard.offsets, shard.tensor.shape, shape, strict=True)
        )
        covered = sum(prod(shard.tensor.shape) for shard in distinct)
        if not inside or covered != prod(shape):
            raise ValueError(f"{self.dir}: {name}: its shards hold {covered} of {prod(shape)} elements")
        dtypes = {shard.tensor.dtype for shard in distinct}
        if len(dtypes) > 1:
            raise ValueError(f"{self.dir}: {name}: its shards are of several dtypes: {sorted(map(str, dtypes))}")
        return ShardedTensor(shape, dtypes.pop() if dtypes else torch.float32, distinct)

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> FsdpCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def find_files(directory: Path) -> list[Path]:
    """The files of all ranks, in their order.  Raises ValueError unless they are all the files of one run."""
    files_by_world_size: dict[int, dict[int, Path]] = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        if name := FILE_NAME.fullmatch(path.name):
            files_by_world_size.setdefault(int(name["world_size"]), {})[int(name["rank"])] = path
    if not files_by_world_size:
        raise ValueError(f"{directory} has no model_world_size_W_rank_R.pt; give global_step_N/actor of an FSDP run")
    if len(files_by_world_size) > 1:
        sizes = ", ".join(map(str, sorted(files_by_world_size)))
        raise ValueError(f"{directory} has files of runs with {sizes} ranks; move those of all but one away")
    ((world_size, files),) = files_by_world_size.items()
    missing = sorted(set(range(world_size)) - files.keys())
    if missing or len(files) > world_size:
        raise ValueError(
            f"{directory} has files of {len(files)} of {world_size} ranks"
            + (f"; missing: ranks {', '.join(map(str, missing[:8]))}" if missing else "")
            + ". Each node of a run writes those of its own ranks: copy all of them here"
        )
    return [files[rank] for rank in range(world_size)]


def _named_values(file: TorchFile) -> dict[str, Any]:
    if not isinstance(file.content, dict) or not all(isinstance(name, str) for name in file.content):
        raise ValueError(f"{file.path} does not hold the state dictionary of a model")
    return {_WRAPPERS.sub("", name): value for name, value in file.content.items()}


def _shards(file: TorchFile, rank: int, value: Any) -> tuple[tuple[int, ...], list[TensorBox]]:
    """The shape of the whole tensor, and what this rank has of it."""
    if isinstance(value, FileTensor):
        return value.shape, [TensorBox(rank, value, (0,) * len(value.shape))]
    kind = value.name if isinstance(value, PickledObject) else type(value).__name__
    if kind == "DTensor":
        return _of_dtensor(file, rank, value)
    if kind == "ShardedTensor":
        return _of_sharded_tensor(rank, value)
    raise ValueError(f"is a {kind}, not a tensor")


def _of_dtensor(file: TorchFile, rank: int, value: PickledObject) -> tuple[tuple[int, ...], list[TensorBox]]:
    local, spec, shape = value.get("_local_tensor"), value.get("_spec"), tuple(value.args[0])
    if not isinstance(local, FileTensor) or not isinstance(spec, PickledObject):
        raise ValueError("is a DTensor without its local tensor")
    coordinates = _coordinates(file, rank, spec.get("mesh", "device_mesh"))
    starts, sizes = [0] * len(shape), list(shape)
    for placement, (coordinate, num_parts) in zip(spec.get("placements"), coordinates, strict=True):
        if placement.name == "Replicate":
            continue
        if placement.name != "Shard":
            raise ValueError(f"is placed as {placement.name} over the mesh; FSDP alone is read (Shard and Replicate)")
        dim = placement.get("dim") if placement.get("dim") is not None else placement.args[0]
        # As torch.chunk: the last parts may be smaller, or empty.
        most = -(-sizes[dim] // num_parts)
        first = min(most * coordinate, sizes[dim])
        starts[dim], sizes[dim] = starts[dim] + first, min(most, sizes[dim] - first)
    # An empty part may have any shape.
    if prod(sizes) != prod(local.shape) or (prod(sizes) and tuple(sizes) != local.shape):
        raise ValueError(f"rank {rank} should have {tuple(sizes)} of {shape}, its file has {local.shape}")
    return shape, [TensorBox(rank, local, tuple(starts))]


def _coordinates(file: TorchFile, rank: int, mesh: Any) -> list[tuple[int, int]]:
    """The rank's place in each dimension of the mesh, as (coordinate, size)."""
    if not isinstance(mesh, PickledObject):
        raise ValueError("is a DTensor without a mesh")
    sizes, strides, ranks = _mesh(file, mesh)
    if prod(sizes) != len(ranks) or rank not in ranks:
        raise ValueError(f"is on a part of a larger mesh ({'x'.join(map(str, sizes))} of {len(ranks)} ranks)")
    position = ranks.index(rank)
    return [(position // stride % size, size) for size, stride in zip(sizes, strides, strict=True)]


def _mesh(file: TorchFile, mesh: PickledObject) -> tuple[list[int], list[int], list[int]]:
    """Sizes and strides of the mesh by dimension, and its ranks in memory order, from whatever torch stored it."""
    layout, whole = mesh.get("_layout"), mesh.get("mesh", "_mesh")
    if isinstance(layout, PickledObject):
        axes = layout.get("axes") or [layout]
        sizes, strides = ([n for axis in axes for n in _numbers(axis.get(key))] for key in ("shape", "stride"))
        return sizes, strides, file.read(mesh.get("_rank_map")).tolist()
    if isinstance(whole, FileTensor):
        return list(whole.shape), list(whole.strides), file.read(whole).flatten().tolist()
    raise ValueError("has a mesh of a version of torch that is not known here")


def _numbers(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _of_sharded_tensor(rank: int, value: PickledObject) -> tuple[tuple[int, ...], list[TensorBox]]:
    if not isinstance(value.state, tuple) or len(value.state) < 2 or not isinstance(value.state[1], PickledObject):
        raise ValueError("is a ShardedTensor without its metadata")
    local, metadata = value.state[:2]
    shards = []
    for shard in local:
        tensor, shard_metadata = shard.get("tensor"), shard.get("metadata")
        if not isinstance(tensor, FileTensor) or list(tensor.shape) != list(shard_metadata.get("shard_sizes")):
            raise ValueError(f"rank {rank} has a shard that is not of the shape that its metadata says")
        shards.append(TensorBox(rank, tensor, tuple(shard_metadata.get("shard_offsets"))))
    return tuple(metadata.get("size")), shards
