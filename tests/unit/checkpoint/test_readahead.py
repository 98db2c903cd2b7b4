"""What a reader of a file asks the kernel for before it comes there."""

from __future__ import annotations

import itertools
import os

import pytest

from scalerl.checkpoint.readahead import Readahead

MIB = 2**20
START = 5 * MIB + 17


@pytest.mark.parametrize("size", [3 * MIB, 40 * MIB, 41 * MIB + 5])
def test_all_that_follows_is_asked_for_once_and_in_time(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def fadvise(file: int, start: int, length: int, advice: int) -> None:
        assert (file, advice) == (3, os.POSIX_FADV_WILLNEED)
        asked.append((start, start + length))

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    ahead, end = Readahead(START, START + size), START + size
    for position in range(START, end, 2 * MIB):
        passed = min(position + 2 * MIB, end)
        ahead.reading(3, passed)
        assert asked[-1][1] >= min(passed + 8 * MIB, end)
    assert asked[0][0] == START and asked[-1][1] == end
    assert all(before[1] == after[0] for before, after in itertools.pairwise(asked))
    # Not a call for every part.
    assert len(asked) <= size // (8 * MIB) + 2


def test_nothing_is_asked_for_what_is_read_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: pytest.fail(str(arguments)))
    Readahead(0, 1000).reading(3, 1000)
