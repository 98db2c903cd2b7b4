"""Ranks that outlive a test end with the last test of this folder: idle ones would still take processor time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.launch import end_ranks


@pytest.fixture(scope="package", autouse=True)
def kept_ranks() -> Iterator[None]:
    yield
    end_ranks()
