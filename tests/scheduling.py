"""The scheduler of `make test AT_A_TIME=N`: each unit of tests (`tests/units.py`) is run by one process of pytest."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

from tests.units import unit_of


class FolderScheduling(LoadScopeScheduling):
    """Tests that share something stay on one process; the units come in the order of their tests (`place_of`).

    pytest-xdist's own `loadgroup` does not: it writes the group into a node id that pytest 9.2 no longer reads.
    """

    def __init__(self, config: Any, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
