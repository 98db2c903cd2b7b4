"""Temporary directories that are removed with their process; those of a killed process are removed by a later one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# File that the process which owns the directory keeps locked.
LOCK = "lock"
REMOVE_ATTEMPTS = 20
REMOVE_PAUSE_S = 0.1


@contextmanager
def scratch_directory(
    prefix: str, parent: Path, clean: Callable[[Path], None] = lambda directory: None
) -> Iterator[Path]:
    """Yields an empty directory with a random name, accessible to this user only, and removes it after the block.

    clean: called before a directory is removed, also before one of a killed process is.
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
    """Removes this user's directories whose process was killed, which nobody has locked."""
    for directory in parent.glob(f"{prefix}*"):
        try:
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            with open(directory / LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                clean(directory)
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # the owner is alive, or another process was quicker
            continue


def _remove(directory: Path) -> None:
    """Removes a directory, with retries, as processes that are ending may still write files there."""
    for _ in range(REMOVE_ATTEMPTS):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(REMOVE_PAUSE_S)
