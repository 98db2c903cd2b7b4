"""Runs a function in a fresh process, so that megatron's globals and CUDA contexts end with it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any

TIMEOUT_S = 600.0


def run_isolated(function: Callable, *args: Any, device: str) -> Any:
    """function(*args) as rank 0 of 1. device: `cuda`, or `cpu`, where the process sees no GPU."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_rank, args=(function, args, device, queue))
    process.start()
    try:
        for _ in range(int(TIMEOUT_S)):
            try:
                result, error = queue.get(timeout=1)
            except Empty:
                assert process.is_alive(), f"{function.__name__} died without a word, exit code {process.exitcode}"
                continue
            assert error is None, f"{function.__name__} on {device} failed:\n{error}"
            return pickle.loads(result)
        raise AssertionError(f"{function.__name__} on {device}: no answer in {TIMEOUT_S:.0f} s")
    finally:
        process.join(timeout=10)
        if process.is_alive():
            process.kill()


def _rank(function: Callable, args: tuple, device: str, queue: Any) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if device == "cpu":
        # Before torch looks for one.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        from scalerl.parallel import platform

        platform.install(device)
        # Plain bytes: torch would send tensors as handles that die with this process.
        queue.put((pickle.dumps(function(*args)), None))
    except BaseException:
        queue.put((None, traceback.format_exc()))
