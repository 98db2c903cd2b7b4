"""The shards of an FSDP checkpoint: which part of each tensor `model_world_size_{W}_rank_{R}.pt` has.

A state dictionary has DTensors (FSDP2, and FSDP1 with a device mesh), ShardedTensors (FSDP1 without one), or whole
tensors, on meshes of one dimension or two (HSDP: replicas of shards).

torch.load reads the files, maps their tensors into memory, and takes the names in their pickles from a list here:
classes of torch.distributed become inert records, as they want a process group to be made, and any other name is
refused. So nothing of a file is run.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2

from scalerl.checkpoint.errors import DamagedCheckpointError, read_error

FILE_NAME = re.compile(r"model_world_size_(?P<world_size>\d+)_rank_(?P<rank>\d+)\.pt")
# Parts of names that wrappers of modules add.
_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
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
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): _same,
    ("torch._utils", "_rebuild_wrapper_subclass"): _wrapper,
    ("torch._tensor", "_rebuild_from_type_v2"): _with_state,
    # A member of an enumeration or of a class; which member is of no use here.
    ("builtins", "getattr"): _member,
    ("__builtin__", "getattr"): _member,
}


class _Unpickler(pickle.Unpickler):
    """Finds the names on the lists, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module.startswith("torch.distributed.") and name in _DESCRIPTIONS:
            return type(name, (PickledObject,), {"name": name})
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a file of tensors")


# torch.load takes a module of pickling.
_PICKLE = SimpleNamespace(__name__=__name__, Unpickler=_Unpickler)


def read_torch_file(path: Path) -> Any:
    """What torch.save wrote, with tensors that are mapped from the file, and records of all other objects.

    Every byte is compared with its checksum. Raises DamagedCheckpointError naming the file when torch.save did not
    write it, it is damaged, or it names anything that is on no list.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.split("/", 1)[-1] for name in archive.namelist()}
            # torch would take one with constants.pkl for a program.
            if "data.pkl" not in names or "constants.pkl" in names:
                raise DamagedCheckpointError(f"{path} has no state dictionary: torch.save did not write it")
            if (damaged := archive.testzip()) is not None:
                raise DamagedCheckpointError(f"{path}: the bytes of {damaged} are not those that were saved")
        # Not weights_only, whose list has functions that make the objects.
        return torch.load(path, "cpu", _PICKLE, weights_only=False, mmap=True)
    except pickle.UnpicklingError as error:
        raise DamagedCheckpointError(f"{path} is refused: {error}") from None
    except zipfile.BadZipFile as error:
        raise DamagedCheckpointError(
            f"{path}: is damaged, or not what torch.save has written since 1.6: {error}"
        ) from None
    except OSError as error:
        raise read_error(str(path), error) from None
    except DamagedCheckpointError:
        raise
    # zipfile, pickle and torch fail in many ways at a flipped bit.
    except Exception as error:
        raise DamagedCheckpointError(f"{path}: is damaged: {error!r}") from None


@dataclass(frozen=True)
class TensorBox:
    """A box of a tensor, in a rank's file.  offsets: of the box in the whole tensor."""

    rank: int
    tensor: torch.Tensor
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor as its shards.  shape: of the whole tensor.  shards: every part of it once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: list[TensorBox]


class FsdpCheckpoint:
    """The tensors of all ranks' files, by their names in the model.

    Raises ValueError: no such files, some missing, of several runs, damaged, or with anything in them but tensors.
    """

    def __init__(self, directory: str | Path) -> None:
        self.dir = Path(directory)
        self._paths = find_files(self.dir)
        self.tensors = self._join([_named_values(path) for path in self._paths])

    def _join(self, values_by_rank: Sequence[Mapping[str, Any]]) -> dict[str, ShardedTensor]:
        names = values_by_rank[0].keys()
        for rank, values in enumerate(values_by_rank):
            if values.keys() != names:
                different = ", ".join(sorted(values.keys() ^ names)[:4])
                raise ValueError(f"{self._paths[rank]} has other tensors than rank 0's file: {different}")
        return {name: self._tensor(name, [values[name] for values in values_by_rank]) for name in names}

    def _tensor(self, name: str, values_by_rank: Sequence[Any]) -> ShardedTensor:
        shape: tuple[int, ...] | None = None
        places: dict[tuple[int, ...], TensorBox] = {}
        for rank, value in enumerate(values_by_rank):
            try:
                whole, shards = _shards(rank, value)
            except ValueError as error:
                raise ValueError(f"{self._paths[rank]}: {name}: {error}") from None
            if shape not in (None, whole):
                raise ValueError(f"{self._paths[rank]}: {name} has shape {whole}, in rank 0's file {shape}")
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


def _named_values(path: Path) -> dict[str, Any]:
    content = read_torch_file(path)
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path} does not hold the state dictionary of a model")
    return {_WRAPPERS.sub("", name): value for name, value in content.items()}


def _shards(rank: int, value: Any) -> tuple[tuple[int, ...], list[TensorBox]]:
    """The shape of the whole tensor, and what this rank has of it."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), [TensorBox(rank, value, (0,) * value.dim())]
    kind = value.name if isinstance(value, PickledObject) else type(value).__name__
    if kind == "DTensor":
        return _of_dtensor(rank, value)
    if kind == "ShardedTensor":
        return _of_sharded_tensor(rank, value)
    raise ValueError(f"is a {kind}, not a tensor")


def _of_dtensor(rank: int, value: PickledObject) -> tuple[tuple[int, ...], list[TensorBox]]:
    local, spec, shape = value.get("_local_tensor"), value.get("_spec"), tuple(value.args[0])
    if not isinstance(local, torch.Tensor) or not isinstance(spec, PickledObject):
        raise ValueError("is a DTensor without its local tensor")
    coordinates = _coordinates(rank, spec.get("mesh", "device_mesh"))
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
    if prod(sizes) != prod(local.shape) or (prod(sizes) and tuple(sizes) != tuple(local.shape)):
        raise ValueError(f"rank {rank} should have {tuple(sizes)} of {shape}, its file has {tuple(local.shape)}")
    return shape, [TensorBox(rank, local, tuple(starts))]


def _coordinates(rank: int, mesh: Any) -> list[tuple[int, int]]:
    """The rank's place in each dimension of the mesh, as (coordinate, size)."""
    if not isinstance(mesh, PickledObject):
        raise ValueError("is a DTensor without a mesh")
    sizes, strides, ranks = _mesh(mesh)
    if prod(sizes) != len(ranks) or rank not in ranks:
        raise ValueError(f"is on a part of a larger mesh ({'x'.join(map(str, sizes))} of {len(ranks)} ranks)")
    position = ranks.index(rank)
    return [(position // stride % size, size) for size, stride in zip(sizes, strides, strict=True)]


def _mesh(mesh: PickledObject) -> tuple[list[int], list[int], list[int]]:
    """Sizes and strides of the mesh by dimension, and its ranks in memory order, from whatever torch stored it."""
    layout, whole = mesh.get("_layout"), mesh.get("mesh", "_mesh")
    if isinstance(layout, PickledObject):
        axes = layout.get("axes") or [layout]
        sizes, strides = ([n for axis in axes for n in _numbers(axis.get(key))] for key in ("shape", "stride"))
        return sizes, strides, mesh.get("_rank_map").tolist()
    if isinstance(whole, torch.Tensor):
        return list(whole.shape), list(whole.stride()), whole.flatten().tolist()
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
        if not isinstance(tensor, torch.Tensor) or list(tensor.shape) != list(shard_metadata.get("shard_sizes")):
            raise ValueError(f"rank {rank} has a shard that is not of the shape that its metadata says")
        shards.append(TensorBox(rank, tensor, tuple(shard_metadata.get("shard_offsets"))))
    return tuple(metadata.get("size")), shards
