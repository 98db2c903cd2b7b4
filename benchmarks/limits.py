"""What the machine can do at most: matrix products on all its ranks at the same time, and copying memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def matmul_flops_of_rank(device: str, dtype: str, barrier: Callable[[], object], seconds: float) -> float:
    """FLOP/s of this rank's fastest square matmul while all ranks compute.

    Ranks on one CPU share caches, memory and clock (and hyperthreads the units themselves), so the sum over ranks that
    run together is the machine's ceiling; the sum over ranks measured alone is not.
    """
    from scalerl.models.flops import measured_matmul_peak

    # The first call pays for threads and workspaces; without it one rank would start late and end alone.
    measured_matmul_peak(device, dtype, seconds=0.0)
    barrier()
    peak = measured_matmul_peak(device, dtype, seconds=seconds)
    barrier()
    return peak


def matmul_flops(num_ranks: int, device: str, dtype: str, seconds: float) -> list[float]:
    """FLOP/s of each of num_ranks processes that compute together; on a GPU of one process."""
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    num_ranks = num_ranks if device == "cpu" else 1
    barrier, queue = context.Barrier(num_ranks), context.SimpleQueue()
    processes = multiprocessing.spawn(_measure, (device, dtype, seconds, barrier, queue), nprocs=num_ranks, join=False)
    while not processes.join(timeout=120):
        pass
    return [queue.get() for _ in range(num_ranks)]


def _measure(rank: int, device: str, dtype: str, seconds: float, barrier: Any, queue: Any) -> None:
    import torch

    if device == "cpu":
        torch.set_num_threads(1)
    queue.put(matmul_flops_of_rank(device, dtype, barrier.wait, seconds))


def copy_bytes_per_s(num_bytes: int, device: str, repeats: int = 20) -> float:
    """Of the fastest copy between two buffers, by one thread (GPU: on the device). Small buffers stay in cache."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    source, target = (torch.ones(max(num_bytes, 1), dtype=torch.uint8, device=device) for _ in range(2))
    best_s = float("inf")
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - begin)
    torch.set_num_threads(threads)
    return num_bytes / best_s
