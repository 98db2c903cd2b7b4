"""Directories for temporary files that go with their process; those of a killed one go with the next."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Held by the process that owns the directory.
LOCK = "lock"
REMOVE_ATTEMPTS = 20
REMOVE_PAUSE_S = 0.1


@contextmanager
def scratch_directory(
    prefix: str, parent: Path, clean: Callable[[Path], None] = lambda directory: None
) -> Iterator[Path]:
    """An empty directory of a random name, readable for this user alone, gone after the block.

    clean: called before it is removed, also before that of a killed process is.
    """
    remove_abandoned(prefix, parent, clean)
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    with open(directory / LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield directory
        finally:
            clean(directory)
            _remove(directory)


def remove_abandoned(prefix: str, parent: Path, clean: Callable[[Path], None] = lambda directory: None) -> None:
    """Directories of this user whose process was killed: nobody holds their lock."""
    for directory in parent.glob(f"{prefix}*"):
        try:
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            with open(directory / LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                clean(directory)
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # the owner is there, or another process was quicker
            continue


def _remove(directory: Path) -> None:
    """The last processes that have files in it may write while they end."""
    for _ in range(REMOVE_ATTEMPTS):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(REMOVE_PAUSE_S)
