"""The program that sums a tensor over a process for each device, by NCCL on GPUs and by gloo on a CPU."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 120.0
NUM_BYTES = {"cuda": 1 << 28, "cpu": 1 << 20}
REPEATS = 5


def sum_over_ranks(rank: int, num_ranks: int, device: str, directory: str) -> None:
    """Runs one rank: rank 0 writes the seconds of a sum to a file of the directory; a wrong sum raises RuntimeError."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=dist.FileStore(f"{directory}/rendezvous", num_ranks), rank=rank,
        world_size=num_ranks, timeout=timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    values = torch.full((NUM_BYTES[device] // 4,), float(rank + 1), device=device)
    dist.all_reduce(values)
    expected = num_ranks * (num_ranks + 1) / 2
    if not bool((values == expected).all()):
        raise RuntimeError(f"the sum over {num_ranks} ranks is {values[0].item():g} on rank {rank}, not {expected:g}")
    seconds = min(_seconds_of_a_sum(values, device) for _ in range(REPEATS))
    if rank == 0:
        (Path(directory) / "seconds").write_text(str(seconds))
    dist.destroy_process_group()


def _seconds_of_a_sum(values: torch.Tensor, device: str) -> float:
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    dist.all_reduce(values)
    synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--device", choices=sorted(NUM_BYTES), required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scalerl-probe-") as directory:
        mp.spawn(sum_over_ranks, (arguments.ranks, arguments.device, directory), nprocs=arguments.ranks)  # pyright: ignore[reportPrivateImportUsage]
        seconds = float((Path(directory) / "seconds").read_text())
    print(json.dumps({"bytes": NUM_BYTES[arguments.device], "seconds": seconds}))


if __name__ == "__main__":
    main()
