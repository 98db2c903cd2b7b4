"""Files that are written whole or not at all, and are on the disk once they are there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

# That wait for the disk at the same time.
_MAX_THREADS = 16


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of `path`, and is on the disk, when the block ends.

    A block that raises leaves `path` as it was. Missing parent directories are made. Raises OSError.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{token_hex(4)}.tmp")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    # Otherwise a power failure may lose the new name.
    fsync(path.parent)


def flush(paths: Iterable[Path]) -> None:
    """Forces files and directories onto the disk, several at a time: what waits together takes the disk once."""
    paths = list(paths)
    if paths:
        with ThreadPoolExecutor(min(_MAX_THREADS, len(paths))) as pool:
            list(pool.map(fsync, paths))


def fsync(path: Path) -> None:
    """Forces what was written to a file or directory onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
