"""One process at a time writes a directory: a job that was submitted twice mixes no files with the first."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from scalerl.errors import UserError

logger = logging.getLogger(__name__)

LOCK = "lock"
# How long a network file system may keep the lock of a machine that is gone.
REMOTE_GRACE_S = 120.0
POLL_S = 1.0


class DirectoryInUseError(UserError, RuntimeError):
    """Another process writes there."""


@contextmanager
def directory_lock(directory: Path, setting: str, *, grace_s: float = REMOTE_GRACE_S) -> Iterator[None]:
    """Holds the directory for this process; the kernel gives it back when the process ends, in whatever way.

    Where the file system has no locks, this is a warning and nothing more.

    Args:
        setting: `key = value` that led to the directory, for the error.
        grace_s: how long to wait for a holder on another machine, which may be gone already.
    Raises: DirectoryInUseError, with who has it and since when.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            _take(descriptor, setting, grace_s)
        except OSError as error:
            logger.warning("%s: not locked (%s); see to it that no other run writes there", directory, error)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, setting: str, grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = _holder(descriptor)
            if holder.get("host", socket.gethostname()) == socket.gethostname() or time.monotonic() >= deadline:
                raise DirectoryInUseError(
                    f"{setting}: another run is writing there ({_show(holder)}). Wait for it, end it, or choose another"
                ) from None
            time.sleep(POLL_S)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(_myself()).encode(), 0)


def _myself() -> dict[str, str]:
    job = os.environ.get("SLURM_JOB_ID")
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "process": str(os.getpid()), "since": since} | (
        {"Slurm job": job} if job else {}
    )


def _holder(descriptor: int) -> dict[str, str]:
    """As it wrote it; empty in the moment before it does."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _show(holder: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in holder.items()) or "it has just begun"
