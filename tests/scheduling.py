"""Which tests of the services share a pytest process when several run side by side (`make test AT_A_TIME=N`)."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from xdist.scheduler import LoadScopeScheduling

# Their tests share processes, or addresses; of the other folders a file is what stays together.
SHARING_FOLDERS = ("dist", "sglang", "slurm")


class FolderScheduling(LoadScopeScheduling):
    """A folder whose tests share something stays on one process; in the order in which the folders are named.

    pytest-xdist's own `loadgroup` does not: it writes the group into a node id that pytest 9.2 no longer reads.
    """

    def __init__(self, config: Any, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def unit_of(nodeid: str) -> str:
    """`tests/dist/test_a.py::test_b[c]` is of the unit `tests/dist`, `tests/e2e/test_a.py::test_b` of its file."""
    file = nodeid.partition("::")[0]
    parts = PurePosixPath(file).parts
    return "/".join(parts[:2]) if parts[1:2] and parts[1] in SHARING_FOLDERS else file
