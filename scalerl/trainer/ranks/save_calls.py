"""Saves that ranks write while they train: one call begins a save, and a thread of the driver waits for it."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scalerl.checkpoint.pieces import DIST_CKPT, WrittenFile, write_index
from scalerl.checkpoint.store import CheckpointWriteError
from scalerl.cluster.worker_group import WorkerGroup
from scalerl.errors import RunError, UserError
from scalerl.trainer.ranks.worker import MegatronWorker

# Waits until all of a save is on the disk. The event: the save is given up.
Writing = Callable[[threading.Event], None]
# Seconds until a rank that still writes is asked again; twice as long each time.
_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 1.0


def begin_rank_saves(workers: WorkerGroup, role: str, directory: str) -> Writing:
    """Begins a save on all ranks, which write the weights and optimizer that they have when this returns."""
    workers.call(MegatronWorker.begin_save_checkpoint, role, directory)
    return functools.partial(_finish, workers, role, Path(directory))


def _finish(workers: WorkerGroup, role: str, directory: Path, given_up: threading.Event) -> None:
    """Waits for all ranks, then raises the first error of any of them; CheckpointWriteError when given up."""
    deadline = time.monotonic() + workers.limit(MegatronWorker.written_checkpoint.__name__).seconds
    files: list[WrittenFile] = []
    common: dict[str, Any] = {}
    failures: list[Exception] = []
    # One after the other: they end at about the same time, and each is asked but once when it has ended.
    for rank in range(workers.world_size):
        try:
            file, common = _written(workers, rank, role, deadline, given_up)
            files.append(file)
        except (RunError, UserError) as error:
            failures.append(error)
    if failures:
        raise failures[0]
    write_index(directory / DIST_CKPT, files, common)


def _written(
    workers: WorkerGroup, rank: int, role: str, deadline: float, given_up: threading.Event
) -> tuple[WrittenFile, dict[str, Any]]:
    look_s = _FIRST_LOOK_S
    while not given_up.is_set():
        answer = workers.ask(rank, MegatronWorker.written_checkpoint, role)
        if answer is not None:
            return answer
        if time.monotonic() > deadline:
            limit = workers.limit(MegatronWorker.written_checkpoint.__name__)
            raise CheckpointWriteError(f"rank {rank} still writes after {limit.key}={limit.seconds:.0f} s")
        given_up.wait(look_s)
        look_s = min(2 * look_s, _LAST_LOOK_S)
    # Whoever gave it up ends Ray now, and a call would start Ray anew.
    raise CheckpointWriteError("the run ended before it was written")
