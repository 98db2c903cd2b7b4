"""Counts the devices of the machine that a command runs on, without torch."""

from __future__ import annotations

import os
from typing import Any

from omegaconf import OmegaConf

from scalerl.base import nvidia

# On a CPU a device is a process of about a gigabyte.
MAX_CPU_DEVICES = 8
_RESOLVER = "devices_here"
# The default of trainer.n_gpus_per_node: an interpolation, for it follows from trainer.device.
DEVICES_HERE: Any = f"${{{_RESOLVER}:${{trainer.device}}}}"


def devices_here(device: str) -> int:
    """The number of this machine's GPUs, or on a CPU of its cores, at most MAX_CPU_DEVICES.  device: trainer.device."""
    num_gpus = 0 if device == "cpu" else nvidia.count_devices()
    if num_gpus or device == "cuda":
        return max(1, num_gpus)
    return min(num_cores(), MAX_CPU_DEVICES)


def num_cores() -> int:
    """The number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


OmegaConf.register_new_resolver(_RESOLVER, lambda device: devices_here(device), replace=True)
