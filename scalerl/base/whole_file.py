"""Files that are written whole or not at all, and are on the disk once they are there.

The room of large files is reserved first, and they go to the disk while they are written.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

# That wait for the disk at the same time.
_MAX_THREADS = 16
_libc: Any = ctypes.CDLL(None, use_errno=True)
# sync_file_range(2): start to write what is dirty, and do not wait.
_WRITE = 2
# Bytes that are written between two starts.
_EVERY_BYTES = 32 * 2**20
# What a system says of a disk, a quota or a file that can take no more.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
    """Forces a file or directory onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reserve(file: int, num_bytes: int) -> None:
    """Reserves the disk's room for a file, so that writing it costs less. file: a descriptor.

    Raises OSError where there is no room; does nothing where the filesystem cannot reserve any.
    """
    if hasattr(_libc, "fallocate") and _libc.fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)):
        number = ctypes.get_errno()
        if number in NO_ROOM:
            raise OSError(number, os.strerror(number))


class Writeback:
    """Makes the kernel write a file to the disk while it grows, so that little is left for the fsync at its end.

    Several threads may write the file. Errors are not reported here, but by fsync.
    """

    def __init__(self, file: int) -> None:
        """Begins to count.  file: a descriptor."""
        self._file = file
        self._waiting_bytes = 0
        self._lock = threading.Lock()

    def written(self, num_bytes: int) -> None:
        """Counts bytes that were written."""
        with self._lock:
            self._waiting_bytes += num_bytes
            is_due = self._waiting_bytes >= _EVERY_BYTES
            if is_due:
                self._waiting_bytes = 0
        if is_due and hasattr(_libc, "sync_file_range"):
            # The whole file: the kernel passes over pages that are on their way.
            _libc.sync_file_range(self._file, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE)
