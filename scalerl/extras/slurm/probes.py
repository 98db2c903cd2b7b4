"""Probes of a node before a job uses it: those of `scalerl.cluster.probes`, and of what only a job can know."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scalerl.base import nvidia
from scalerl.cluster.probes import Finding
from scalerl.cluster.probes.gpu import check_driver, find_devices, health_findings
from scalerl.cluster.probes.host import (
    MIN_FREE_DISK_GIB,
    MIN_SHM_GIB,
    check_compiler,
    check_disk,
    check_shared_memory,
    nvidia_smi,
)

PACKAGES = ("scalerl", "torch", "ray", "megatron-core", "sglang", "transformers", "transformer-engine")


@dataclass(frozen=True)
class Limits:
    """What a node must have.

    gpus: devices of each node.  min_disk_gib, min_shm_gib: free space.  needs: a file of paths that must be readable.
    run_dir: a directory of the run, whose file system gets logs and checkpoints.
    """

    gpus: int = 0
    min_disk_gib: float = MIN_FREE_DISK_GIB
    min_shm_gib: float = MIN_SHM_GIB
    needs: Path | None = None
    run_dir: Path | None = None


def all_probes(limits: Limits) -> list[Finding]:
    """Runs all probes on this node."""
    findings = [
        check_paths(limits.needs),
        *(check_disk(directory, limits.min_disk_gib) for directory in _written_directories(limits)),
        check_shared_memory(min_gib=limits.min_shm_gib),
        *health_findings(limits.gpus),
    ]
    if limits.gpus:
        findings.append(check_compiler())
    # Torch takes seconds to import, and a driver that nvidia-smi shows may still not run a program.
    if limits.gpus and (device := nvidia.find_nvidia_device()) is not None:
        findings.append(check_driver(find_devices(), device))
    return findings


def _written_directories(limits: Limits) -> list[Path]:
    directories = [Path(tempfile.gettempdir()), limits.run_dir]
    # One that is not there at all is found by the file that the head wrote.
    return [each for each in directories if each is not None and each.exists()]


def collective_backend(gpus: int) -> str:
    """The backend of the ranks' collectives on this node: nccl where the job has GPUs and torch sees one, else gloo."""
    # Torch takes seconds to import.
    if not gpus or nvidia.find_nvidia_device() is None:
        return "gloo"
    import torch

    return "nccl" if torch.cuda.is_available() and torch.distributed.is_nccl_available() else "gloo"


def check_paths(needs: Path | None) -> Finding:
    """Checks that the paths that the run needs are readable.  needs: a file with one path a line."""
    name, meaning = "paths", "every node reads them"
    if needs is None:
        return Finding(name, True, "the run names none", meaning)
    try:
        wanted = needs.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        return Finding(name, False, str(error), "the run's directory must be on a file system that all nodes share")
    missing = [path for path in wanted if not os.access(path, os.R_OK)]
    if missing:
        why = "put it on a file system that all nodes share, or mend the node's mounts"
        return Finding(name, False, f"not readable: {', '.join(missing)}", why)
    return Finding(name, True, f"{len(wanted)} readable", meaning)


def versions() -> dict[str, str]:
    """The versions that must be equal on all nodes; packages that are not installed are left out."""
    by_name = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return by_name | ({"NVIDIA driver": driver.split("\n")[0].strip()} if driver else {})
