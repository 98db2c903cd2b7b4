"""Runs a function on N ranks with real gloo process groups and returns what each rank returned."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.dist.preload"])


def run_ranks(world_size: int, function: Callable, *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """function(*args) on every rank, RANK and friends set; results in rank order. Fails with the first rank's traceback."""
    queue = _context.Queue()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    ranks = [
        _context.Process(target=_rank, args=(rank, world_size, port, function, args, queue))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < world_size:
            try:
                rank, result, error = queue.get(timeout=1)
            except Empty:
                dead = [rank for rank, process in enumerate(ranks) if process.exitcode and rank not in results]
                assert not dead, f"ranks {dead} of {world_size} died without a word (see their output above)"
                assert time.monotonic() < deadline, f"no answer in {timeout_s} s; {sorted(results)} are done"
                continue
            assert error is None, f"rank {rank} of {world_size} failed:\n{error}"
            results[rank] = pickle.loads(result)
        return [results[rank] for rank in range(world_size)]
    finally:
        for process in ranks:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()


def _rank(rank: int, world_size: int, port: int, function: Callable, args: tuple, queue: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        # Plain bytes: torch would send tensors as file descriptors that die with the rank.
        queue.put((rank, pickle.dumps(function(*args)), None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
        raise
