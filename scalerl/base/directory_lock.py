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

from scalerl.errors import RunError, UserError

logger = logging.getLogger(__name__)

LOCK = "lock"
# A network file system may keep the lock of a lost machine for this long.
REMOTE_GRACE_S = 120.0
# An earlier attempt of the same job ends, or its machine is restarted: nobody is there to be asked.
EARLIER_ATTEMPT_GRACE_S = 900.0
POLL_S = 1.0


class DirectoryInUseError(UserError, RuntimeError):
    """Raised when another process holds the directory."""


class EarlierAttemptError(RunError):
    """Raised when an earlier attempt of the same job still holds the directory: to try again later may help."""


@contextmanager
def directory_lock(
    directory: Path,
    setting: str,
    *,
    grace_s: float = REMOTE_GRACE_S,
    earlier_attempt_grace_s: float = EARLIER_ATTEMPT_GRACE_S,
) -> Iterator[None]:
    """Locks a directory for this process; the kernel releases it when the process ends, however it ends.

    If the file system has no locks, this only logs a warning.

    Args:
        setting: `key = value` that led to the directory, for the error.
        grace_s: seconds to wait for a holder on another machine, which may be lost.
        earlier_attempt_grace_s: seconds to wait for an earlier attempt of the same job, on any machine. Slurm starts a
            job again when it has lost its node, though the processes there may live on.
    Raises: DirectoryInUseError, EarlierAttemptError, naming the holder and since when it holds the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            _acquire(descriptor, setting, grace_s, earlier_attempt_grace_s)
        except OSError as error:
            logger.warning("%s: not locked (%s); see to it that no other run writes there", directory, error)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, setting: str, grace_s: float, earlier_attempt_grace_s: float) -> None:
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder, waited_s = _holder(descriptor), time.monotonic() - began
            if _is_earlier_attempt(holder):
                if waited_s >= earlier_attempt_grace_s:
                    raise EarlierAttemptError(
                        f"{setting}: an earlier attempt of this job is still writing there after {waited_s:.0f} s "
                        f"({_show(holder)}); if that machine lost its slurmd, end the process there"
                    ) from None
            elif holder.get("host", socket.gethostname()) == socket.gethostname() or waited_s >= grace_s:
                raise DirectoryInUseError(
                    f"{setting}: another run is writing there ({_show(holder)}). Wait for it, end it, or choose another"
                ) from None
            time.sleep(POLL_S)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(_myself()).encode(), 0)


def _myself() -> dict[str, str]:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "process": str(os.getpid()), "since": since} | _slurm_attempt()


def _slurm_attempt() -> dict[str, str]:
    """The Slurm job, and the launcher's name for the attempt; empty outside of Slurm."""
    # The launcher's: it hides Slurm's own variables from the command.
    job = os.environ.get("SCALERL_JOB_ID") or os.environ.get("SLURM_JOB_ID")
    attempt = os.environ.get("SCALERL_ATTEMPT_DIR")
    return ({"Slurm job": job} if job else {}) | ({"attempt": Path(attempt).name} if attempt else {})


def _is_earlier_attempt(holder: dict[str, str]) -> bool:
    mine = _slurm_attempt()
    return len(mine) == 2 and holder.get("Slurm job") == mine["Slurm job"] and holder.get("attempt") != mine["attempt"]


def _holder(descriptor: int) -> dict[str, str]:
    """The holder's description of itself; empty in the moment before it writes one."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _show(holder: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in holder.items()) or "it has just begun"
