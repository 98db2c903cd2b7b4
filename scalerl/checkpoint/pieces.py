"""Writing of a torch_dist directory, in which every rank has one file, and the digests of what is written.

A rank writes the pieces that it holds; only their descriptions are gathered. The format is torch's (each piece is
what `torch.save` makes of it), so that whatever reads torch_dist directories reads these.

A digest is about as fast as memory, and different after any change of one byte. A block of 4 KiB is 512 words of 64
bits; its hash is the sum of word times key modulo 2^64 (a multilinear hash with a fixed random odd key for each word,
so no change of a single word is lost). SHA-256 over the hashes of the blocks and the number of bytes is the digest. It
detects damage; it is no protection from forgery.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import mmap
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.serialization import get_crc32_options, set_crc32_options

from scalerl.base.files import Writeback, flush
from scalerl.checkpoint import PIECES_INDEX_NAME

METADATA_NAME = ".metadata"
COMMON_NAME = "common.pt"
# Subdirectory of a model's directory in a checkpoint.
DIST_CKPT = "dist_ckpt"
# Bytes of a tensor that are copied from its device, read or checked at a time.
MAX_PIECE_BYTES = 64 * 2**20
# Small writes are collected up to this.
_BUFFER_BYTES = 2**16

BLOCK_BYTES = 4096
ALGORITHM = "multilinear64-4096"
_WORDS = BLOCK_BYTES // 8
_KEYS = np.concatenate(
    [np.frombuffer(hashlib.sha256(b"scalerl %d" % i).digest(), "<u8") for i in range(_WORDS // 4)]
) | np.uint64(1)
# Bytes that are read or written and hashed at a time: they stay in a processor's cache meanwhile.
CACHED_BYTES = 2 * 2**20
Data = bytes | bytearray | memoryview | np.ndarray


@dataclass(frozen=True)
class Piece:
    """A box of the tensor `key`, of shape `shape`: `tensor`, contiguous, holds the box that begins at `offsets`."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a whole tensor in files."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor in a rank's file.  shape: of the whole tensor.

    payload: where its numbers begin, in bytes from `start`; None, as `digest`, where there is no index.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    file: str
    start: int
    num_bytes: int
    payload: int | None
    digest: str | None

    @property
    def payload_bytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class WrittenFile:
    """A file that a rank wrote. digest: of the whole file."""

    name: str
    num_bytes: int
    digest: str
    pieces: list[StoredPiece]


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Splits the numbers [start, stop) of a tensor, in memory order, into few boxes: (first number, offsets, sizes).

    Each box is one stretch of memory, of at most as many numbers as make MAX_PIECE_BYTES of float32.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        most = MAX_PIECE_BYTES // 4
        for first in range(start, stop, most):
            size = min(most, stop - first)
            yield (first, (first,), (size,)) if shape else (0, (), ())
        return
    inner = prod(shape[1:])
    row, rest = start // inner, shape[1:]
    while start < stop:
        whole = min(stop // inner - row, max(1, MAX_PIECE_BYTES // 4 // inner))
        if start == row * inner and whole > 0 and inner * 4 <= MAX_PIECE_BYTES:
            yield start, (row, *(0 for _ in rest)), (whole, *rest)
            row += whole
        else:
            end = min(stop, (row + 1) * inner)
            for first, offsets, sizes in boxes(rest, start - row * inner, end - row * inner):
                yield row * inner + first, (row, *offsets), (1, *sizes)
            row += 1
        start = min(stop, row * inner)


def write_file(path: Path, pieces: Iterable[Piece]) -> WrittenFile:
    """Writes one rank's file, which is on the disk on return. Tensors on a device come to the host one by one."""
    with _File(path) as file:
        for piece in pieces:
            file.add(piece)
    return file.written


class _File:
    """A file of pieces, whose bytes are hashed while they are written. Pieces begin at blocks of the digest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=_BUFFER_BYTES)
        self._writeback = Writeback(self._file.fileno())
        self._position = 0
        self._hashes: list[np.ndarray] = []
        self._pieces: list[StoredPiece] = []

    def add(self, piece: Piece) -> None:
        assert piece.tensor.is_contiguous(), piece.key
        start, sizes = self._position, tuple(piece.tensor.shape)
        host = piece.tensor.detach().to("cpu")
        before, after = _around_numbers(host.dtype, sizes)
        numbers = as_bytes(host)
        # A part is written while the cache still has it.
        cached = (numbers[first : first + CACHED_BYTES] for first in range(0, len(numbers), CACHED_BYTES))
        digest = Digest()
        for part in (before, *cached, after):
            digest.update(part)
            self._write(part)
        hashes, num_bytes = digest.block_hashes(), digest.num_bytes
        self._pieces.append(
            StoredPiece(
                piece.key,
                piece.shape,
                piece.offsets,
                sizes,
                host.dtype,
                self._path.name,
                start,
                num_bytes,
                len(before),
                digest_of_blocks([hashes], num_bytes),
            )
        )
        self._hashes.append(hashes)
        self._write(bytes(-num_bytes % BLOCK_BYTES))

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._writeback.written(len(data))
        self._position += len(data)

    @property
    def written(self) -> WrittenFile:
        return WrittenFile(
            self._path.name, self._position, digest_of_blocks(self._hashes, self._position), self._pieces
        )

    def __enter__(self) -> _File:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())


# A model has few kinds of pieces, and torch.save takes longer for a small one than all the rest of a save.
@lru_cache(maxsize=4096)
def _around_numbers(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What torch.save writes before and after a tensor's numbers. Without its checksums it depends on none of them."""
    # Memory that is neither written nor read, and so takes no room.
    tensor = fresh_bytes(prod(sizes) * dtype.itemsize).view(dtype).view(sizes)
    recorder = _Recorder(tensor)
    with _without_crc32():
        torch.save(tensor, recorder)  # pyright: ignore[reportArgumentType]  # write and flush are all that it calls
    before, after = recorder.around
    return before, after


class _Recorder:
    """A file that torch.save writes one tensor to, which keeps all bytes but the tensor's numbers."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address, self._num_bytes = tensor.data_ptr(), tensor.nbytes
        self._parts: list[list[bytes]] = [[]]

    def write(self, data: Data) -> int:
        view = np.frombuffer(data, np.uint8)
        if view.size and view.ctypes.data == self._address and view.size == self._num_bytes:
            self._parts.append([])
        else:
            self._parts[-1].append(view.tobytes())
        return view.size

    def flush(self) -> None:
        """Does nothing."""

    @property
    def around(self) -> list[bytes]:
        assert len(self._parts) == 2, "torch.save did not write the numbers in one stretch"
        return [b"".join(parts) for parts in self._parts]


class _without_crc32:
    """Switches off torch's own checksums, which cost as much as the writing and which nothing reads."""

    def __enter__(self) -> None:
        self.before = get_crc32_options()
        set_crc32_options(False)

    def __exit__(self, *_: Any) -> None:
        set_crc32_options(self.before)


def write_index(directory: Path, files: Sequence[WrittenFile], common: Mapping[str, Any]) -> None:
    """Writes the index of the pieces and the ranks' common state, on one rank when all ranks have written.

    Raises ValueError if the pieces of a tensor do not cover it exactly once, OSError if there is no room.
    """
    pieces = {file.name: file.pieces for file in files if file.pieces}
    by_key: dict[str, list[StoredPiece]] = {}
    storage = {}
    for name, written in pieces.items():
        for piece in written:
            by_key.setdefault(piece.key, []).append(piece)
            location = metadata.MetadataIndex(piece.key, torch.Size(piece.offsets))
            storage[location] = filesystem._StorageInfo(name, piece.start, piece.num_bytes)
    content = metadata.Metadata(
        state_dict_metadata={key: _tensor_metadata(key, written) for key, written in by_key.items()},
        planner_data=None,
        storage_data=storage,
    )
    index = {
        "algorithm": ALGORITHM,
        "files": {name: [[p.start, p.payload, p.digest] for p in written] for name, written in pieces.items()},
        "digests": {file.name: file.digest for file in files if file.pieces},
    }
    # In memory: torch's own writer hides why it could not write to a file.
    state = io.BytesIO()
    torch.save(dict(common), state)
    # Megatron's own load looks here for the format.
    megatron = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    written = {
        directory / COMMON_NAME: state.getvalue(),
        directory / "metadata.json": json.dumps(megatron).encode(),
        directory / PIECES_INDEX_NAME: json.dumps(index, separators=(",", ":")).encode(),
        directory / METADATA_NAME: pickle.dumps(content),
    }
    for path, data in written.items():
        path.write_bytes(data)
    flush(written)
    for file in files:
        if not file.pieces:
            (directory / file.name).unlink()


def _tensor_metadata(key: str, pieces: list[StoredPiece]) -> metadata.TensorStorageMetadata:
    _check_cover(key, pieces)
    return metadata.TensorStorageMetadata(
        properties=metadata.TensorProperties(dtype=pieces[0].dtype),
        size=torch.Size(pieces[0].shape),
        chunks=[metadata.ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in pieces],
    )


def _check_cover(key: str, pieces: list[StoredPiece]) -> None:
    shapes = {(piece.shape, piece.dtype) for piece in pieces}
    if len(shapes) > 1:
        raise ValueError(f"ranks disagree about {key}: {sorted(map(str, shapes))}")
    covered, whole = sum(prod(piece.sizes) for piece in pieces), prod(pieces[0].shape)
    starts = sorted(piece.offsets for piece in pieces)
    if covered != whole or any(start == following for start, following in pairwise(starts)):
        raise ValueError(f"{key}: its {len(pieces)} pieces hold {covered} of {whole} elements")


# --- digests, and the bytes that they are of ---


class Digest:
    """The digest of bytes that are given in several parts, in order."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._hashes: list[np.ndarray] = []
        self._rest = b""

    def update(self, data: Data) -> None:
        """Adds the next bytes."""
        view = np.frombuffer(data, np.uint8)
        self.num_bytes += view.size
        if self._rest:
            missing = BLOCK_BYTES - len(self._rest)
            self._rest += view[:missing].tobytes()
            view = view[missing:]
            if len(self._rest) < BLOCK_BYTES:
                return
            self._hashes.append(_hash_blocks(np.frombuffer(self._rest, np.uint8)))
        whole = view.size // BLOCK_BYTES * BLOCK_BYTES
        if whole:
            self._hashes.append(_hash_blocks(view[:whole]))
        self._rest = view[whole:].tobytes()

    def block_hashes(self) -> np.ndarray:
        """The hashes of all blocks, [blocks] uint64; the last block is filled up with zeros."""
        last = []
        if self._rest:
            last = [_hash_blocks(np.frombuffer(self._rest.ljust(BLOCK_BYTES, b"\0"), np.uint8))]
        return np.concatenate([np.empty(0, "<u8"), *self._hashes, *last])

    def hexdigest(self) -> str:
        """The digest of all bytes so far, 32 hex digits."""
        return digest_of_blocks([self.block_hashes()], self.num_bytes)


def digest_of_blocks(hashes: Iterable[np.ndarray], num_bytes: int) -> str:
    """The digest of blocks, 32 hex digits. hashes: arrays of the blocks' hashes, all in order."""
    digest = hashlib.sha256()
    for part in hashes:
        digest.update(np.ascontiguousarray(part, "<u8").data)
    digest.update(num_bytes.to_bytes(8, "little"))
    return digest.hexdigest()[:32]


def digest_of_file(path: Path) -> str:
    """The digest of a file's bytes, 32 hex digits."""
    digest, buffer = Digest(), bytearray(CACHED_BYTES)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
    return digest.hexdigest()


def _hash_blocks(data: np.ndarray) -> np.ndarray:
    return np.einsum("ij,j->i", data.view("<u8").reshape(-1, _WORDS), _KEYS)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which stays as long as this view of it.

    Not by numpy: a storage that numpy has seen can no longer be resized, so its parameter could not leave its device.
    """
    assert tensor.is_contiguous() and tensor.device.type == "cpu", (tensor.device, tensor.stride())
    memory: Any = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memoryview(memory).cast("B")


def fresh_bytes(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8 whose memory is returned to the system with it; malloc would keep much of it for its thread."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
