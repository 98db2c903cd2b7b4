"""Runs a function in fresh processes, so that megatron's globals and CUDA contexts end with them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any

from scalerl.base.process import worker_environment

TIMEOUT_S = 600.0


def run_isolated(function: Callable, *args: Any, device: str) -> Any:
    """function(*args) as rank 0 of 1. device: `cuda`, or `cpu`, where the process sees no GPU."""
    return run_isolated_ranks(1, function, *args, device=device)[0]


def run_isolated_ranks(world_size: int, function: Callable, *args: Any, device: str) -> list[Any]:
    """function(*args) on each rank, RANK, LOCAL_RANK and friends set; in rank order."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, port, function, args, device, queue))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        results: dict[int, Any] = {}
        for _ in range(int(TIMEOUT_S)):
            try:
                rank, result, error = queue.get(timeout=1)
            except Empty:
                dead = [rank for rank, process in enumerate(ranks) if process.exitcode and rank not in results]
                assert not dead, f"{function.__name__}: ranks {dead} died without a word, see their output above"
                continue
            assert error is None, f"{function.__name__} on {device}, rank {rank}, failed:\n{error}"
            results[rank] = pickle.loads(result)
            if len(results) == world_size:
                return [results[rank] for rank in range(world_size)]
        raise AssertionError(
            f"{function.__name__} on {device}: no answer in {TIMEOUT_S:.0f} s; ranks {sorted(results)} are done"
        )
    finally:
        for process in ranks:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def _rank(rank: int, world_size: int, port: int, function: Callable, args: tuple, device: str, queue: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # Before torch looks for a GPU, and NCCL for what both sides of a broadcast must agree on.
    os.environ.update(worker_environment(device, os.environ))
    try:
        import torch

        from scalerl.parallel import platform

        platform.install(device)
        if device == "cuda":
            torch.cuda.set_device(rank)
        # Plain bytes: torch would send tensors as handles that die with this process.
        queue.put((rank, pickle.dumps(function(*args)), None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
