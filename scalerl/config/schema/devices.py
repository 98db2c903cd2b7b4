"""The sections of devices: those of a run, and those that one model or its servers have for themselves."""

from __future__ import annotations

from dataclasses import dataclass

from scalerl.config.machine import DEVICES_HERE
from scalerl.config.schema.fields import key, same_as
from scalerl.config.value_checks import above, at_least, one_of


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


@dataclass
class ResourcePoolConfig:
    """Devices that one role has for itself."""

    # Nodes whose devices are this role's alone; 0: it shares the actor's devices, processes and layout.
    nnodes: int = key(0, at_least(0))
    # Devices (on CPU: processes) per node of that pool.
    n_gpus_per_node: int = key(same_as("trainer.n_gpus_per_node"), at_least(1))


@dataclass
class RolloutPoolConfig(ResourcePoolConfig):
    """Devices that the policy's servers have for themselves."""

    # Nodes whose devices are the servers' alone; 0: they share the trainer's.
    nnodes: int = ResourcePoolConfig.nnodes


@dataclass
class JudgePoolConfig(ResourcePoolConfig):
    """Devices that the judge's servers have for themselves."""

    # Nodes whose devices are the judge's alone; required with judge.enable.
    nnodes: int = ResourcePoolConfig.nnodes
