"""A lock per directory, so that a job that was submitted twice does not mix its files with those of the first."""

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
# A network file system may keep the lock of a lost machine for this long.
REMOTE_GRACE_S = 120.0
POLL_S = 1.0


class DirectoryInUseError(UserError, RuntimeError):
    """Raised when another process holds the directory."""


@contextmanager
def directory_lock(directory: Path, setting: str, *, grace_s: float = REMOTE_GRACE_S) -> Iterator[None]:
    """Locks a directory for this process; the kernel releases it when the process ends, however it ends.

    If the file system has no locks, this only logs a warning.

    Args:
        setting: `key = value` that led to the directory, for the error.
        grace_s: seconds to wait for a holder on another machine, which may be lost.
    Raises: DirectoryInUseError, naming the holder and since when it holds the directory.
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
    # The launcher's: it hides Slurm's own variables from the command.
    job = os.environ.get("SCALERL_JOB_ID") or os.environ.get("SLURM_JOB_ID")
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "process": str(os.getpid()), "since": since} | (
        {"Slurm job": job} if job else {}
    )


def _holder(descriptor: int) -> dict[str, str]:
    """The holder's description of itself; empty in the moment before it writes one."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _show(holder: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in holder.items()) or "it has just begun"
