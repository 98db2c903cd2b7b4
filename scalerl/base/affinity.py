"""The cores on which the process of a GPU runs: those on the side of the machine that the GPU is attached to."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

# Below the root of the file system: Linux' list of the cores near a device of the PCI bus, such as "0-31,64-95".
_NEAR = "sys/bus/pci/devices/{address}/local_cpulist"


def run_near_gpu(index: int = 0, root: Path = Path("/")) -> None:
    """Moves this process to the cores near a GPU, for what it copies there and back is in the memory near its cores.

    A process keeps its cores where that would leave it fewer than it has compute threads: the system does not tell, or
    a job or container has its cores elsewhere.

    index: of the GPU among those that this process sees.  root: root of the file system.
    """
    import torch

    properties = torch.cuda.get_device_properties(index)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    cores = cores_near(address, allowed, root)
    if len(cores) < torch.get_num_threads():
        logger.info("GPU %s: stays on its %d cores, of which %d are near it", address, len(allowed), len(cores))
        return
    try:
        run_on(cores)
    except OSError as error:
        # A container may forbid it; the run goes on as well from afar.
        logger.warning("GPU %s: stays on its %d cores, as the system refuses others: %s", address, len(allowed), error)
        return
    logger.info("GPU %s: runs on the %d near it of %d cores", address, len(cores), len(allowed))


def cores_near(address: str, allowed: set[int], root: Path = Path("/")) -> set[int]:
    """The cores of `allowed` that are near a device; none where the system does not tell.

    address: of the device on the PCI bus, such as "0000:1b:00.0".  root: root of the file system.
    """
    try:
        text = (root / _NEAR.format(address=address)).read_text(encoding="ascii")
    except OSError:
        return set()
    near: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        near.update(range(int(first), int(last or first) + 1))
    return near & allowed


def run_on(cores: set[int]) -> None:
    """Moves this process to some of its cores: its threads that run on all of them, and those that they start."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    for thread in os.listdir("/proc/self/task"):
        # A thread may have ended.
        with contextlib.suppress(OSError):
            # One on fewer cores was put there by whoever started it.
            if os.sched_getaffinity(int(thread)) == before:
                os.sched_setaffinity(int(thread), cores)
