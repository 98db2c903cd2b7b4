"""Digests of a checkpoint's data: about as fast as memory, and different after any change of one byte.

A block of 4 KiB is 512 words of 64 bits; its hash is the sum of word times key modulo 2^64 (a multilinear hash with a
fixed random odd key for each word, so no change of a single word is lost). SHA-256 over the hashes of the blocks and
the number of bytes is the digest. It detects damage; it is no protection from forgery.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

BLOCK_BYTES = 4096
ALGORITHM = "multilinear64-4096"
_WORDS = BLOCK_BYTES // 8
_KEYS = np.concatenate(
    [np.frombuffer(hashlib.sha256(b"scalerl %d" % i).digest(), "<u8") for i in range(_WORDS // 4)]
) | np.uint64(1)
# Bytes that are read or written and hashed at a time: they stay in a processor's cache meanwhile.
CACHED_BYTES = 2 * 2**20
Data = bytes | bytearray | memoryview | np.ndarray


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
