"""Measures the bandwidth of an all-reduce between two nodes, with the library that the training will use."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

from scalerl.base import rendezvous

NUM_BYTES = 64 << 20
ROUNDS = 3

_listener: socket.socket | None = None


def listen_for_peer(host: str) -> tuple[str, int]:
    """Opens a socket on which a pair of nodes will meet, and returns its (address, port) on this node."""
    global _listener
    _listener = rendezvous.listen(host)
    return _listener.getsockname()[:2]


def measured(rank: int, address: tuple[str, int], backend: str, timeout_s: float) -> float:
    """Gbit/s of the fastest of some all-reduces between this node and its peer: NUM_BYTES over seconds."""
    import torch
    import torch.distributed as dist

    global _listener
    listener, _listener = (_listener if rank == 0 else None), None
    store = rendezvous.store(address, world_size=2, timeout_s=timeout_s, listener=listener)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=timeout_s))
    try:
        numbers = torch.ones(NUM_BYTES // 4, device="cuda" if backend == "nccl" else "cpu")
        dist.all_reduce(numbers)
        best_s = float("inf")
        for _ in range(ROUNDS):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(numbers)
            if backend == "nccl":
                torch.cuda.synchronize()
            best_s = min(best_s, time.perf_counter() - began)
        return 8 * NUM_BYTES / best_s / 1e9
    finally:
        dist.destroy_process_group()
