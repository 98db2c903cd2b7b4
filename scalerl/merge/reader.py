"""Reading tensors of a torch_dist checkpoint in one process, without running code from it."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata, planner

_ALLOWED: dict[tuple[str, str], Any] = {
    (item.__module__, item.__qualname__): item
    for item in (
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        filesystem._StoragePrefix,
        planner.SavePlan,
        planner.WriteItem,
        planner.WriteItemType,
        planner.TensorWriteData,
        planner.BytesIOWriteData,
        torch.Size,
        torch.serialization._get_layout,
        OrderedDict,
    )
}
# Where the checkpoint was written; of no use here, and not worth making a path of.
_PATH_CLASSES = frozenset({"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"})


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the classes that checkpoint metadata is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.split(".")[0] == "pathlib" and name in _PATH_CLASSES:
            return _joined
        raise pickle.UnpicklingError(f"{module}.{name} has no place in checkpoint metadata")


def _joined(*parts: Any) -> str:
    return "/".join(str(p) for p in parts)


class DistCheckpoint:
    """The tensors of a torch_dist directory, each read whole when asked for.

    Raises ValueError when the directory is not one, or when its metadata holds anything but metadata.
    """

    def __init__(self, directory: str | Path) -> None:
        self.dir = Path(directory)
        # FileSystemReader.read_metadata would unpickle whatever is there.
        self._metadata = _read_metadata(self.dir / ".metadata")
        self._reader = dcp.FileSystemReader(self.dir)

    def tensors(self) -> Mapping[str, metadata.TensorStorageMetadata]:
        """Key -> metadata (size, properties.dtype) of every tensor, optimizer state included."""
        entries = self._metadata.state_dict_metadata
        return {k: v for k, v in entries.items() if isinstance(v, metadata.TensorStorageMetadata)}

    def problem(self, key: str) -> str | None:
        """What keeps the tensor from being read whole, from metadata and file sizes alone; None when nothing does."""
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, metadata.TensorStorageMetadata), key
        covered = sum(chunk.sizes.numel() for chunk in entry.chunks)
        if covered != entry.size.numel():
            return f"{key}: saved pieces hold {covered} of {entry.size.numel()} elements"
        for chunk in entry.chunks:
            stored = self._metadata.storage_data.get(metadata.MetadataIndex(key, chunk.offsets))
            if stored is None:
                return f"{key}: the piece at {tuple(chunk.offsets)} was not saved"
            if Path(stored.relative_path).name != stored.relative_path:
                return f"{key}: file name {stored.relative_path!r} leaves the checkpoint directory"
            file = self.dir / stored.relative_path
            if not file.is_file():
                return f"{key}: file {stored.relative_path} is missing"
            if file.stat().st_size < stored.offset + stored.length:
                return f"{key}: file {stored.relative_path} is cut short at {file.stat().st_size} bytes"
        return None

    def read(self, key: str) -> torch.Tensor:
        """The whole tensor, on the CPU, in the stored dtype. Raises ValueError when its data cannot be read."""
        entry = self.tensors()[key]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            load_planner = dcp.DefaultLoadPlanner()
            load_planner.set_up_planner({key: tensor}, self._metadata, is_coordinator=True)
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            self._reader.read_data(load_planner.create_local_plan(), load_planner).wait()
        except (OSError, EOFError, RuntimeError, ValueError, AssertionError, pickle.UnpicklingError) as error:
            raise ValueError(f"{self.dir}: tensor {key} cannot be read: {error}") from error
        return tensor


def _read_metadata(path: Path) -> metadata.Metadata:
    if not path.is_file():
        raise ValueError(f"{path} is missing: {path.parent} is not a torch_dist checkpoint, or its save did not finish")
    try:
        with path.open("rb") as file:
            content = _MetadataUnpickler(file).load()
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is refused: {error}") from None
    except (EOFError, AttributeError, IndexError, TypeError, KeyError, ValueError, ImportError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from None
    if not isinstance(content, metadata.Metadata) or content.storage_data is None:
        raise ValueError(f"{path} is not the metadata of a torch_dist checkpoint")
    return content
