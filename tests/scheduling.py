"""Which tests of the services share a pytest process when several run side by side (`make test AT_A_TIME=N`)."""

from __future__ import annotations

import functools
import re
from pathlib import Path, PurePosixPath
from typing import Any

from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).parent
# Their tests share ranks, servers or addresses.
SHARING_FOLDERS = ("dist", "sglang", "slurm")
# The session's Ray and the processes that runs leave for each other (tests/conftest.py): of tests/ray, and of each file
# of tests/e2e that takes them.
KEPT = "what runs leave for each other"
_TAKES_KEPT = re.compile(r"\bkept: Kept\b|\bprocesses: Processes\b")


class FolderScheduling(LoadScopeScheduling):
    """Tests that share something stay on one process; the units come in the order in which their tests are named.

    pytest-xdist's own `loadgroup` does not: it writes the group into a node id that pytest 9.2 no longer reads.
    """

    def __init__(self, config: Any, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def unit_of(nodeid: str) -> str:
    """`tests/dist/test_a.py::test_b[c]` is of the unit `tests/dist`, `tests/ray/test_a.py::test_b` of KEPT.

    Of the other folders a file is a unit.
    """
    file = nodeid.partition("::")[0]
    parts = PurePosixPath(file).parts
    if parts[1:2] and parts[1] in SHARING_FOLDERS:
        return "/".join(parts[:2])
    return KEPT if parts[:2] == ("tests", "ray") or _takes_kept(file) else file


@functools.cache
def _takes_kept(file: str) -> bool:
    """file: below the directory of the project."""
    path = TESTS.parent / file
    return path.is_file() and _TAKES_KEPT.search(path.read_text(encoding="utf-8")) is not None
