"""The one message where Ray does not start, or its cluster is not joined: why, how full this machine is, what to do."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from scalerl.base.byte_units import GIB
from scalerl.config import GenerationConfig, PPOConfig, SFTConfig, pools_of
from scalerl.errors import RunError, UserError

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
        "else. Without RAY_ADDRESS the run starts a Ray of its own."
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
