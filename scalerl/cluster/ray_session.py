"""The Ray session that this process starts: directory, token, signal handlers, and the error if it does not start."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from scalerl.base.files import GIB, scratch_directory
from scalerl.config import GenerationConfig, PPOConfig, SFTConfig, pools_of
from scalerl.errors import RunError, UserError

logger = logging.getLogger(__name__)

# Prefix of session directories, one per run. Short: they hold sockets, whose paths have at most 107 characters.
PREFIX = "scalerl-ray-"
AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def sessions_parent() -> Path:
    """The directory in which session directories are made: RAY_TMPDIR, or the system's for temporary files."""
    return Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())


@contextmanager
def session_directory(logs_to: Path | None = None, parent: Path | None = None) -> Iterator[Path]:
    """Makes a directory for Ray's sockets and logs, removed after the block; a killed run's is removed by the next run.

    logs_to: gets Ray's logs when the block ends by an error that the user did not cause.
    parent: where to make the directory; None: `sessions_parent`.
    """
    with scratch_directory(PREFIX, sessions_parent() if parent is None else parent) as directory:
        try:
            yield directory
        except Exception as error:
            if logs_to is not None and not isinstance(error, UserError):
                try:
                    _keep_logs(directory, logs_to)
                except OSError as problem:
                    # A full disk may be what the error is about, which is worth more than the logs.
                    logger.warning("Ray's logs were not kept in %s: %s", logs_to, problem)
            raise


def _keep_logs(directory: Path, logs_to: Path) -> None:
    for logs in directory.glob("session_*/logs"):
        if not logs.parent.is_symlink():
            shutil.copytree(logs, logs_to, dirs_exist_ok=True, ignore_dangling_symlinks=True)


@contextmanager
def own_token() -> Iterator[None]:
    """Makes Ray's processes accept only calls with this run's random token; RAY_AUTH_MODE=disabled turns it off.

    A token that the user has set is used as it is.
    """
    # The class is compiled: Ray's types do not have it.
    from ray._raylet import AuthenticationTokenLoader  # pyright: ignore[reportAttributeAccessIssue]

    before = {name: os.environ.get(name) for name in AUTH_VARIABLES}
    if not (before["RAY_AUTH_TOKEN"] or before["RAY_AUTH_TOKEN_PATH"]):
        # Else Ray would make one for all clusters of this user and keep it in the home directory.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Ray reads the token once in a process's life, unless told.
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Restores the SIGTERM handler after ray.init, which replaces it by two: one in Python, and one below Python that
    ends the process with a crash dump."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        # Raised by Ray's handler.
        if error.code == signal.SIGTERM and callable(handler):
            handler(signal.SIGTERM, None)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)


# Ray's message where the path of a socket in its directory is longer than the system allows.
_LONG_PATH = "AF_UNIX path length"
# Ray's messages may end with the stack of its last try, and name a file that nobody needs.
_STACK = "Traceback (most recent call last)"
_MAX_LINES = 10
# Seconds in which the head of a cluster has to take a connection. Ray itself would try for more than ten minutes.
REACH_S = 30.0
_LOOK_S = 1.0


class RayStartError(RunError):
    """Ray did not start on this machine, or the cluster at RAY_ADDRESS was not joined."""


@contextmanager
def start_explained(directory: Path, logs_to: Path | None, address: str | None) -> Iterator[None]:
    """Makes one error of whatever Ray raises while the block starts it; a signal's exceptions pass.

    directory: below which Ray has its files.  logs_to: gets Ray's logs after the block; None: they are kept nowhere.
    address: of the cluster that the block joins; None: it starts one.
    Raises RayStartError; UserError where the directory is what is wrong.
    """
    if address is None and not directory.is_dir():
        raise UserError(f"{directory}: no such directory, and Ray has its files below it; set RAY_TMPDIR to one")
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Ray raises errors of all kinds, a plain Exception too
        if _LONG_PATH in str(error):
            raise UserError(
                f"Ray's sockets do not fit into {directory}: {error}; set RAY_TMPDIR to a directory with a shorter path"
            ) from error
        if address is None:
            raise RayStartError(_not_started(error, directory, logs_to)) from error
        raise RayStartError(_not_joined(error, address)) from error


def one_machine_violations(cfg: PPOConfig | SFTConfig | GenerationConfig) -> Iterator[str]:
    """Yields an error for each pool of several nodes, where a run would start a Ray on this machine alone."""
    if os.environ.get("RAY_ADDRESS"):
        return
    for pool in pools_of(cfg):
        if pool.nnodes > 1:
            yield (
                f"{pool.section}.nnodes = {pool.nnodes}: without RAY_ADDRESS a run starts a Ray on this machine alone, "
                "which no other one joins; start Ray on each machine and set RAY_ADDRESS to its head "
                f"(docs/clusters.md), give Slurm the run (scalerl launch slurm), or set {pool.section}.nnodes=1"
            )


def wait_for_head(address: str) -> None:
    """Waits until something takes connections at HOST:PORT; other forms of an address (auto, ray://) are Ray's to find.

    Raises ConnectionError after REACH_S seconds.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    deadline = time.monotonic() + REACH_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
            return
        except OSError as error:
            if time.monotonic() + _LOOK_S > deadline:
                raise ConnectionError(f"nothing takes a connection there ({error}), tried for {REACH_S:g} s") from error
        time.sleep(_LOOK_S)


def _not_started(error: Exception, directory: Path, logs_to: Path | None) -> str:
    kept = "" if logs_to is None else f"\nRay's logs: {logs_to} (gcs_server.*, raylet.*)."
    return (
        f"Ray did not start on {socket.gethostname()}: {_reason(error)}\n"
        "The configuration does not cause this; mostly the machine is too busy, or something on it is full. It has "
        f"now: {_machine_now(directory)}.{kept}\n"
        "Start the same command again when there is more: end what else runs here, make room, or set RAY_TMPDIR to a "
        "directory (of a short path) on another disk."
    )


def _not_joined(error: Exception, address: str) -> str:
    return (
        f"the Ray cluster at RAY_ADDRESS = {address} was not joined from {socket.gethostname()}: {_reason(error)}\n"
        "It has ended, its head is too busy, or this machine does not reach it. `ray status --address "
        f"{address}` asks it. Its logs are on its machines, in /tmp/ray/session_latest/logs where it was told nothing "
        "else. Without RAY_ADDRESS the run starts Ray itself."
    )


def _reason(error: Exception) -> str:
    """What Ray says, without the stack that may follow, nor what only announces it."""
    said = str(error).partition(_STACK)[0].removesuffix("Last connection error: ")
    lines = [line.strip() for line in said.splitlines() if line.strip(" .")]
    return "\n  ".join(lines[:_MAX_LINES]) or type(error).__name__


def _machine_now(directory: Path) -> str:
    """How busy and how full this machine is.  directory: of Ray's files."""
    memory = psutil.virtual_memory()
    parts = [
        f"a load of {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB of memory",
    ]
    for name, path in (("/dev/shm, for Ray's objects", Path("/dev/shm")), (f"{directory}, for its files", directory)):
        with suppress(OSError):
            usage = shutil.disk_usage(path)
            parts.append(f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB in {name}")
    return "; ".join(parts)
