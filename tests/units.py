"""Which tests of the services share a pytest process when several run side by side, and in which order they come.

A unit is what one process runs (`tests/scheduling.py`).
"""

from __future__ import annotations

import functools
import re
from pathlib import Path, PurePosixPath

TESTS = Path(__file__).parent
# Their tests share ranks, servers or addresses.
SHARING_FOLDERS = ("dist", "sglang", "slurm")
# The session's Ray and the processes that runs leave for each other (tests/conftest.py): of tests/ray, and of each file
# of tests/e2e that takes them.
KEPT = "what runs leave for each other"
# The units that take minutes, so that what is left for the end is short: whoever is done with one takes the next.
LONG = (KEPT, "tests/dist", "tests/slurm", "tests/sglang", "tests/e2e/test_quickstart.py", "tests/e2e/test_own_run.py")
_TAKES_KEPT = re.compile(r"\bkept: Kept\b|\bprocesses: Processes\b")


def unit_of(nodeid: str) -> str:
    """`tests/dist/test_a.py::test_b[c]` is of the unit `tests/dist`, `tests/ray/test_a.py::test_b` of KEPT.

    Of the other folders a file is a unit.
    """
    file = nodeid.partition("::")[0]
    parts = PurePosixPath(file).parts
    if parts[1:2] and parts[1] in SHARING_FOLDERS:
        return "/".join(parts[:2])
    return KEPT if parts[:2] == ("tests", "ray") or _takes_kept(file) else file


def place_of(nodeid: str) -> int:
    """Where a test's unit stands among all: those of LONG in their order, then the others."""
    unit = unit_of(nodeid)
    return LONG.index(unit) if unit in LONG else len(LONG)


@functools.cache
def _takes_kept(file: str) -> bool:
    """file: below the directory of the project."""
    path = TESTS.parent / file
    return path.is_file() and _TAKES_KEPT.search(path.read_text(encoding="utf-8")) is not None
