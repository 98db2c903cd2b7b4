"""A rank runs on the cores near its GPU.

python -m pytest tests/gpu/test_affinity.py -q
"""

from __future__ import annotations

import os

from tests.gpu.isolated import run_isolated


def move() -> tuple[set[int], set[int], set[int], int]:
    """Runs alone in a process: its cores before and after, those that NVIDIA's library names, its compute threads."""
    import pynvml
    import torch

    from scalerl.base.affinity import run_near_gpu

    before = os.sched_getaffinity(0)
    run_near_gpu()
    pynvml.nvmlInit()
    # By its identity, as the library counts GPUs that this process does not see.
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    try:
        masks = pynvml.nvmlDeviceGetCpuAffinity(handle, max(before) // 64 + 1)
    except pynvml.NVMLError_NotSupported:
        # A virtual machine may hide where its GPU is; then every core is as near as any other.
        masks = [-1 & 2**64 - 1] * (max(before) // 64 + 1)
    named = {64 * word + bit for word, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1}
    return before, os.sched_getaffinity(0), named, torch.get_num_threads()


def test_a_rank_runs_near_its_gpu() -> None:
    before, after, named, num_threads = run_isolated(move, device="cuda")
    near = before & named
    assert after == (near if len(near) >= num_threads else before)
