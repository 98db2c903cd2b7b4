"""Digests: the same however the bytes come, another one after any change."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl.checkpoint.pieces import BLOCK_BYTES, Digest, digest_of_blocks, digest_of_file


def digest_of(*parts: bytes) -> str:
    digest = Digest()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


@given(st.binary(max_size=50), st.integers(1, 600), st.lists(st.integers(0, 12_000), max_size=6))
def test_the_same_however_the_bytes_come(start: bytes, times: int, cuts: list[int]) -> None:
    data = start * times
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert digest_of(*(data[a:b] for a, b in pairwise(places))) == digest_of(data)


@pytest.mark.parametrize("size", [1, 8, 4095, 4096, 4097, 10_000])
def test_every_flipped_bit_every_lost_and_every_added_byte_changes_it(size: int) -> None:
    data = bytearray(random.Random(size).randbytes(size))
    seen = {digest_of(data), digest_of(data[:-1]), digest_of(data + b"\0"), digest_of(b"\0" + data)}
    assert len(seen) == 4
    places = random.Random(1).sample(range(size * 8), min(size * 8, 300))
    for place in [0, size * 8 - 1, *places]:
        data[place // 8] ^= 1 << place % 8
        assert digest_of(data) not in seen
        data[place // 8] ^= 1 << place % 8


def test_swapped_words_and_blocks_change_it() -> None:
    data = random.Random(3).randbytes(2 * BLOCK_BYTES)
    others = [
        data[8:16] + data[:8] + data[16:],
        data[BLOCK_BYTES:] + data[:BLOCK_BYTES],
        bytes(len(data)),
        bytes(len(data) - 8),
    ]
    assert len({digest_of(data), *map(digest_of, others)}) == 5


def test_of_a_file_from_the_blocks_of_its_parts(tmp_path) -> None:
    """Parts that begin at blocks: each has its digest, and the file's needs no second reading."""
    parts = [random.Random(n).randbytes(n) for n in (BLOCK_BYTES, 3 * BLOCK_BYTES, 100)]
    (tmp_path / "file").write_bytes(b"".join(parts))
    digests = [Digest() for _ in parts]
    for digest, part in zip(digests, parts, strict=True):
        digest.update(part)
    hashes = [digest.block_hashes() for digest in digests]
    assert digest_of_blocks(hashes, sum(map(len, parts))) == digest_of_file(tmp_path / "file") == digest_of(*parts)


def test_it_stays_what_it_is() -> None:
    """Checkpoints of years ago are compared with it."""
    assert digest_of(b"") == "af5570f5a1810b7af78caf4bc70a660f"
    assert digest_of(np.arange(3000, dtype="<u4").tobytes()) == "1be615a83dac6080d4a5baca507b0ab1"
