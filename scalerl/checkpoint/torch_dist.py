"""Reading a torch_dist directory, piece by piece, without running code from it and without Megatron.

A tensor is stored as pieces (boxes of it): each piece is the output of `torch.save` for one tensor, at a place in some
file. A directory that `checkpoint.pieces` wrote has an index, with the digest of each piece and the place of its
numbers.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from scalerl.checkpoint import PIECES_INDEX_NAME
from scalerl.checkpoint.errors import CheckpointReadError, DamagedCheckpointError, RemovedCheckpointError, read_error
from scalerl.checkpoint.pieces import (
    ALGORITHM,
    BLOCK_BYTES,
    CACHED_BYTES,
    COMMON_NAME,
    METADATA_NAME,
    Digest,
    StoredPiece,
    TensorSpec,
    as_bytes,
    fresh_bytes,
)

# Files that a process has open, without those of a checkpoint.
_OTHER_FILES = 512

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
# Paths in the metadata say where the checkpoint was written, which is of no use here: they become strings.
_PATH_CLASSES = frozenset({"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"})

Box = tuple[tuple[int, ...], tuple[int, ...]]


def allow_open_files(count: int) -> None:
    """Raises the soft limit of open files, as far as the hard one allows, if `count` more would not fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


@contextmanager
def while_there(directory: Path) -> Iterator[None]:
    """Raises RemovedCheckpointError for an error of the block if the checkpoint's directory is gone by then."""
    try:
        yield
    except Exception:
        if directory.is_dir():
            raise
        raise RemovedCheckpointError(
            f"{directory} was removed while it was read, as by the rotation of the run that saved it. Take a newer "
            "one; trainer.ckpt_every_to_keep and trainer.max_actor_ckpt_to_keep say which stay"
        ) from None


class DistCheckpoint:
    """The tensors of a torch_dist directory. Use as a context manager, or call close().

    Raises ValueError when the directory is not one, or when its metadata holds anything but metadata. Several threads
    may read at the same time.
    """

    def __init__(self, directory: str | Path) -> None:
        self.dir = Path(directory)
        # FileSystemReader.read_metadata would unpickle whatever is there.
        self._metadata = _read_metadata(self.dir / METADATA_NAME)
        self._index = _read_index(self.dir / PIECES_INDEX_NAME)
        self._files: dict[str, int] = {}
        allow_open_files(len({stored.relative_path for stored in self._metadata.storage_data.values()}))
        # (file, start) of the pieces whose digests have been compared.
        self._verified: set[tuple[str, int]] = set()

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """The tensors by key, optimizer state included."""
        entries = self._metadata.state_dict_metadata
        return {
            key: TensorSpec(tuple(entry.size), entry.properties.dtype)
            for key, entry in entries.items()
            if isinstance(entry, metadata.TensorStorageMetadata)
        }

    @cached_property
    def common(self) -> Mapping[str, Any]:
        """The state that is the same on all ranks; {} where none was saved.  Raises DamagedCheckpointError."""
        path = self.dir / COMMON_NAME
        if not path.is_file():
            return {}
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, ValueError, KeyError, AttributeError, EOFError, pickle.UnpicklingError):
            raise DamagedCheckpointError(f"{path} is damaged; scalerl inspect --check compares every file") from None

    @property
    def has_digests(self) -> bool:
        return bool(self._index)

    def is_verified(self, piece: StoredPiece) -> bool:
        """Whether all bytes of the piece have been read from here, and are those that were saved."""
        return (piece.file, piece.start) in self._verified

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of the whole tensor.  Raises DamagedCheckpointError if the checkpoint does not have it."""
        if key not in self.tensors:
            raise DamagedCheckpointError(f"{self.dir}: {key}: not in the checkpoint")
        return self.tensors[key].shape

    def pieces(self, key: str) -> Iterator[StoredPiece]:
        """The stored pieces of a tensor.  Raises DamagedCheckpointError for a piece that was not saved."""
        shape = self.shape(key)
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, metadata.TensorStorageMetadata), key
        for chunk in entry.chunks:
            offsets = tuple(chunk.offsets)
            stored = self._metadata.storage_data.get(metadata.MetadataIndex(key, chunk.offsets))
            if stored is None:
                raise DamagedCheckpointError(f"{self.dir}: {key}: the piece at {offsets} was not saved")
            if os.path.basename(stored.relative_path) != stored.relative_path:
                raise DamagedCheckpointError(
                    f"{self.dir}: {key}: file name {stored.relative_path!r} leaves the checkpoint directory"
                )
            payload, digest = self._index.get((stored.relative_path, stored.offset), (None, None))
            yield StoredPiece(
                key,
                shape,
                offsets,
                tuple(chunk.sizes),
                entry.properties.dtype,
                stored.relative_path,
                stored.offset,
                stored.length,
                payload,
                digest,
            )

    def problem(self, key: str) -> str | None:
        """What keeps the tensor from being read whole, from metadata and file sizes alone; None when nothing does."""
        try:
            pieces = list(self.pieces(key))
        except DamagedCheckpointError as error:
            return str(error).removeprefix(f"{self.dir}: ")
        covered, whole = sum(prod(piece.sizes) for piece in pieces), prod(self.tensors[key].shape)
        if covered != whole:
            return f"{key}: saved pieces hold {covered} of {whole} elements"
        for piece in pieces:
            file = self.dir / piece.file
            if not file.is_file():
                return f"{key}: file {piece.file} is missing"
            if file.stat().st_size < piece.start + piece.num_bytes:
                return f"{key}: file {piece.file} is cut short at {file.stat().st_size} bytes"
        return None

    def read(self, key: str) -> torch.Tensor:
        """The whole tensor, on the CPU, in the stored dtype; as `read_box`."""
        stored = self.tensors[key]
        out = fresh_bytes(stored.num_bytes).view(stored.dtype).view(stored.shape)
        self.read_box(key, ((0,) * out.dim(), stored.shape), out)
        return out

    def read_box(self, key: str, box: Box, out: torch.Tensor) -> None:
        """Reads a box of a tensor into `out`, of its sizes and any dtype, on any device. Every piece read is checked.

        Raises DamagedCheckpointError, also where the pieces leave a part of the box out.
        """
        offsets, sizes = box
        missing = prod(sizes)
        for piece in self.pieces(key):
            shared = intersection(box, (piece.offsets, piece.sizes))
            if shared is None:
                continue
            missing -= prod(shared[1])
            reader = PieceReader(self, piece)
            target = box_view(out, shared, offsets)
            if shared[1] == piece.sizes and reader.fills(target):
                reader.read_into(target)
            else:
                for place, rows in reader.rows():
                    rows_shared = intersection(shared, (place, tuple(rows.shape)))
                    if rows_shared is not None:
                        box_view(out, rows_shared, offsets).copy_(box_view(rows, rows_shared, place))
            reader.finish()
        if missing:
            raise DamagedCheckpointError(
                f"{self.dir}: {key}: {missing} of {prod(sizes)} elements at {offsets} were not saved"
            )

    def _unpickle(self, piece: StoredPiece) -> torch.Tensor:
        try:
            # From the file, so that memory holds the tensor and no copy of the piece.
            tensor = torch.load(io.BufferedReader(_PieceFile(self, piece)), map_location="cpu", weights_only=True)
        except (DamagedCheckpointError, CheckpointReadError):
            raise
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
            raise self._damaged(piece, f"cannot be read: {error}") from None
        if not torch.is_tensor(tensor) or tensor.numel() != prod(piece.sizes) or tensor.dtype != piece.dtype:
            raise self._damaged(piece, "is something else than its metadata says")
        return tensor.reshape(piece.sizes)

    def _fill(self, piece: StoredPiece, out: memoryview, position: int) -> None:
        """Fills `out` with the bytes of the piece's file from `position` on."""
        try:
            file = self._file(piece.file)
            while out:
                size = os.preadv(file, [out], position)
                if not size:
                    raise self._damaged(piece, f"the file is cut short at {position} bytes")
                out, position = out[size:], position + size
        except OSError as error:
            raise read_error(self._place(piece), error) from None

    def _file(self, name: str) -> int:
        # Two threads may both open the file; the later descriptor is closed.
        if name not in self._files:
            opened = os.open(self.dir / name, os.O_RDONLY)
            if self._files.setdefault(name, opened) != opened:
                os.close(opened)
        return self._files[name]

    def _damaged(self, piece: StoredPiece, what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self._place(piece)} {what}")

    def _place(self, piece: StoredPiece) -> str:
        return f"{self.dir / piece.file}: tensor {piece.key} at {list(piece.offsets)} + {list(piece.sizes)}:"

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def __enter__(self) -> DistCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _PieceFile(io.RawIOBase):
    """The bytes of a stored piece as a file."""

    def __init__(self, checkpoint: DistCheckpoint, piece: StoredPiece) -> None:
        self._checkpoint, self._piece, self._position = checkpoint, piece, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._piece.num_bytes}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")[: max(0, self._piece.num_bytes - self._position)]
        self._checkpoint._fill(self._piece, out, self._piece.start + self._position)
        self._position += len(out)
        return len(out)


class PieceReader:
    """Reads the numbers of one stored piece in their order, a part at a time; `finish` compares the piece's digest."""

    def __init__(self, checkpoint: DistCheckpoint, piece: StoredPiece) -> None:
        """Raises DamagedCheckpointError, as all methods."""
        self._checkpoint, self._piece = checkpoint, piece
        self._digest, self._position = Digest(), 0
        # Where there is no index only the whole piece can be read.
        self._whole = checkpoint._unpickle(piece).view(-1) if piece.payload is None else None
        if piece.payload is not None and piece.payload + piece.payload_bytes > piece.num_bytes:
            raise checkpoint._damaged(piece, "has no room for its numbers")
        self._skip(piece.payload or 0)

    def read_into(self, target: torch.Tensor) -> None:
        """Reads the next numbers, as many as `target` has, into it.  target: of any dtype, strides and device."""
        if self._whole is not None:
            numbers, self._whole = self._whole[: target.numel()], self._whole[target.numel() :]
            target.copy_(numbers.view(target.shape))
        elif self.fills(target):
            self._read(as_bytes(target))
        else:
            numbers = torch.empty(target.shape, dtype=self._piece.dtype)
            self._read(as_bytes(numbers))
            target.copy_(numbers)

    def fills(self, target: torch.Tensor) -> bool:
        """Whether the piece's bytes go right into the memory of `target`."""
        is_plain = target.device.type == "cpu" and target.dtype == self._piece.dtype and target.is_contiguous()
        return is_plain and self._whole is None

    def rows(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yields the whole piece, a few rows at a time: (offsets in the stored tensor, rows). They share memory."""
        sizes, offsets = self._piece.sizes, self._piece.offsets
        if not sizes:
            self.read_into(number := torch.empty((), dtype=self._piece.dtype))
            yield offsets, number
            return
        step = max(1, CACHED_BYTES // (prod(sizes[1:]) * self._piece.dtype.itemsize))
        buffer = torch.empty((min(step, sizes[0]), *sizes[1:]), dtype=self._piece.dtype)
        for first in range(0, sizes[0], step):
            part = buffer[: min(step, sizes[0] - first)]
            self.read_into(part)
            yield (offsets[0] + first, *offsets[1:]), part

    def finish(self) -> None:
        """Reads the rest of the piece, and the zeros behind the piece up to the next one.

        Raises DamagedCheckpointError if these bytes are not those that were saved.
        """
        if self._whole is not None:
            return
        self._skip(self._piece.num_bytes - self._position)
        if self._piece.digest is None:
            return
        behind = memoryview(bytearray(-self._piece.num_bytes % BLOCK_BYTES))
        self._checkpoint._fill(self._piece, behind, self._piece.start + self._piece.num_bytes)
        if any(behind) or self._digest.hexdigest() != self._piece.digest:
            raise self._checkpoint._damaged(self._piece, "its bytes are not those that were saved")
        self._checkpoint._verified.add((self._piece.file, self._piece.start))

    def _skip(self, num_bytes: int) -> None:
        buffer = memoryview(bytearray(min(num_bytes, CACHED_BYTES)))
        for start in range(0, num_bytes, CACHED_BYTES):
            self._read(buffer[: num_bytes - start])

    def _read(self, out: memoryview) -> None:
        # A part is hashed while the processor's cache still has it.
        for start in range(0, len(out), CACHED_BYTES):
            part = out[start : start + CACHED_BYTES]
            self._checkpoint._fill(self._piece, part, self._piece.start + self._position)
            self._digest.update(part)
            self._position += len(part)


def intersection(one: Box, other: Box) -> Box | None:
    """The box that both boxes share; None if they share nothing."""
    starts = tuple(map(max, one[0], other[0]))
    stops = tuple(min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def box_view(tensor: torch.Tensor, box: Box, origin: Sequence[int]) -> torch.Tensor:
    """View of the box in a tensor that begins at `origin`."""
    for dim, (start, size, first) in enumerate(zip(*box, origin, strict=True)):
        tensor = tensor.narrow(dim, start - first, size)
    return tensor


def _joined(*parts: Any) -> str:
    return "/".join(str(p) for p in parts)


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


def _read_metadata(path: Path) -> metadata.Metadata:
    if not path.is_file():
        raise DamagedCheckpointError(
            f"{path} is missing: {path.parent} is not a torch_dist checkpoint, or its save did not finish"
        )
    try:
        with path.open("rb") as file:
            content = _MetadataUnpickler(file).load()
    except pickle.UnpicklingError as error:
        raise DamagedCheckpointError(f"{path} is refused: {error}") from None
    except (EOFError, AttributeError, IndexError, TypeError, KeyError, ValueError, ImportError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error!r}") from None
    if not isinstance(content, metadata.Metadata) or content.storage_data is None:
        raise DamagedCheckpointError(f"{path} is not the metadata of a torch_dist checkpoint")
    return content


def _read_index(path: Path) -> dict[tuple[str, int], tuple[int, str]]:
    """Reads the index, (file, start) -> (payload, digest); empty if there is none, as where megatron wrote itself."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["algorithm"] != ALGORITHM:
            raise ValueError(f"its digests are {content['algorithm']!r}, not {ALGORITHM}")
        return {
            (file, int(start)): (int(payload), str(digest))
            for file, pieces in content["files"].items()
            for start, payload, digest in pieces
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from None
