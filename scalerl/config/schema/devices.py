"""The sections of devices: those of a run, and those that one model or its servers have for themselves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from scalerl.base import nvidia
from scalerl.config.schema.fields import key, same_as
from scalerl.config.value_checks import above, at_least, one_of

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


@dataclass
class DevicesConfig:
    """The keys of a `trainer` section whose program needs devices."""

    # auto: cuda when torch sees a GPU, cpu when there is none, an error when there is one that torch does not see.
    # cpu hides the GPUs of the machine from all of the run.
    device: str = key("auto", one_of("auto", "cuda", "cpu"))
    nnodes: int = key(1, at_least(1))
    # Devices (on CPU: processes) per node. Default: the GPUs of the machine that the command runs on; on a CPU its
    # cores, at most 8.
    n_gpus_per_node: int = key(DEVICES_HERE, at_least(1))
    # Seconds that a collective, a call of the ranks or a start of the servers may take before the run stops and names
    # what is missing.
    timeout_s: float = key(1800.0, above(0))

    @property
    def num_devices(self) -> int:
        """The number of devices of all nodes; on a CPU, of processes."""
        return self.nnodes * self.n_gpus_per_node


@dataclass
class ResourcePoolConfig:
    """Devices that one role, or its servers, have for themselves."""

    # Nodes whose devices are this section's alone; 0: none. A role without any shares the actor's devices, processes
    # and layout, and the policy's servers share the trainer's devices; a judge needs some.
    nnodes: int = key(0, at_least(0))
    # Devices (on CPU: processes) per node of that pool.
    n_gpus_per_node: int = key(same_as("trainer.n_gpus_per_node"), at_least(1))

    @property
    def num_devices(self) -> int:
        """The number of devices of all nodes; on a CPU, of processes."""
        return self.nnodes * self.n_gpus_per_node
