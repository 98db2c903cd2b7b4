"""Ranks that outlive a test end with the last test of this folder: idle ones would still take processor time."""

from __future__ import annotations

import pytest

from tests.dist.launch import end_ranks
from tests.folders import is_last_of_its_folder


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if is_last_of_its_folder(item, nextitem):
        end_ranks()
