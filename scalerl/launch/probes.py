"""Probes of a node before a job uses it. The probe of what the machine does not have says "not here", and passes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
COMMAND_TIMEOUT_S = 60.0
# Open files of one process: Ray and servers hold a file for each connection.
MIN_OPEN_FILES = 4096
# Registered memory of an InfiniBand adapter counts as locked.
MIN_LOCKED_GIB = 1.0
# Errors of the driver before this belong to another job.
XID_SINCE = "1 hour ago"
INFINIBAND = Path("/sys/class/infiniband")
PACKAGES = ("scalerl", "torch", "ray", "megatron-core", "sglang", "transformers", "transformer-engine")


@dataclass(frozen=True)
class Probe:
    """The result of one check of a node.

    value: what the node has.  meaning: where the probe is not ok, what this does to a run and what to do.
    """

    name: str
    ok: bool
    value: str
    meaning: str = ""


@dataclass(frozen=True)
class Limits:
    """What a node must have.

    gpus: devices of each node.  min_disk_gib, min_shm_gib: free space.  needs: a file of paths that must be readable.
    """

    gpus: int = 0
    min_disk_gib: float = 5.0
    min_shm_gib: float = 1.0
    needs: Path | None = None


def not_here(name: str, what: str) -> Probe:
    """The probe of something that the machine does not have, which passes."""
    return Probe(name, True, f"not here: {what}")


def all_probes(limits: Limits) -> list[Probe]:
    """Runs all probes on this node."""
    temporary = Path(tempfile.gettempdir())
    return [
        paths(limits.needs),
        space("disk", temporary, limits.min_disk_gib, "Ray's session and its spilled objects are there"),
        space("/dev/shm", Path("/dev/shm"), limits.min_shm_gib, "Ray's objects and the weights for servers are there"),
        open_files(),
        locked_memory(),
        devices(limits.gpus),
        memory_errors(),
        driver_errors(),
        nvlink(),
        infiniband(),
    ]


def paths(needs: Path | None) -> Probe:
    """Probe of the paths that the run needs: each must be readable.  needs: a file with one path a line."""
    if needs is None:
        return not_here("paths", "the run names none")
    try:
        wanted = needs.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        return Probe("paths", False, str(error), "the run's directory must be on a file system that all nodes share")
    missing = [path for path in wanted if not os.access(path, os.R_OK)]
    if missing:
        meaning = "put it on a file system that all nodes share, or mend the node's mounts"
        return Probe("paths", False, f"not readable: {', '.join(missing)}", meaning)
    return Probe("paths", True, f"{len(wanted)} readable")


def space(name: str, path: Path, min_gib: float, use: str) -> Probe:
    """Probe of the free space in a directory.  use: what it is used for."""
    try:
        free = shutil.disk_usage(path).free / GIB
    except OSError as error:
        return Probe(name, False, str(error), use)
    meaning = "" if free >= min_gib else f"less than {min_gib:g} GiB: {use}; clean up what other jobs left"
    return Probe(name, free >= min_gib, f"{free:.1f} GiB free in {path}", meaning)


def open_files() -> Probe:
    """Probe of the limit of open files of a process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ok = hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES
    return Probe("open files", ok, _limit(hard), "" if ok else f"below {MIN_OPEN_FILES}: raise LimitNOFILE of slurmd")


def locked_memory(infiniband: Path = INFINIBAND) -> Probe:
    """Probe of the limit of locked memory, which InfiniBand needs."""
    if not _names(infiniband):
        return not_here("locked memory", "no InfiniBand, which needs it")
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    ok = hard == resource.RLIM_INFINITY or hard >= MIN_LOCKED_GIB * GIB
    meaning = "" if ok else "NCCL cannot register memory with the adapter: LimitMEMLOCK=infinity of slurmd"
    return Probe("locked memory", ok, _limit(hard), meaning)


def devices(wanted: int) -> Probe:
    """Probe of the number of GPUs."""
    if shutil.which("nvidia-smi") is None:
        return not_here("devices", "no nvidia-smi")
    # An nvidia-smi that fails shows no device.
    listed = _nvidia_smi("--list-gpus") or ""
    num_gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
    meaning = (
        "" if num_gpus >= wanted else f"the job asks for {wanted}: a device fell off the bus, or the driver is down"
    )
    return Probe("devices", num_gpus >= wanted, f"{num_gpus} GPUs", meaning)


def memory_errors() -> Probe:
    """Probe of the memory errors that the GPUs counted."""
    fields = "index,ecc.errors.uncorrected.volatile.total,remapped_rows.failure,remapped_rows.pending"
    listed = _nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if listed is None:
        return not_here("ECC", "no nvidia-smi, or one that does not count them")
    bad = bad_rows(listed)
    meaning = "memory of the device is failing: results are not to be trusted; drain the node" if bad else ""
    return Probe("ECC", not bad, "; ".join(bad) or "no uncorrected errors", meaning)


def bad_rows(csv: str) -> list[str]:
    """Lists the GPUs with memory errors, each as text.

    csv: index, uncorrected errors, remapping failed, remapping pending; a device that counts none says [N/A].
    """
    bad = []
    for line in csv.splitlines():
        index, *counts = (word.strip() for word in line.split(","))
        if any(count.lower() not in ("0", "no", "[n/a]", "n/a", "") for count in counts):
            bad.append(f"GPU {index}: {', '.join(counts)} (uncorrected, remapping failed, pending)")
    return bad


def driver_errors() -> Probe:
    """Probe of the device faults (Xid) that the driver wrote to the kernel's log."""
    done = _run("dmesg", "--since", XID_SINCE)
    if done is None:
        return not_here("Xid", "the kernel's log cannot be read")
    lines = xid_lines(done)
    meaning = "the driver reported a fault of a device: nvidia-smi -q, reset or drain the node" if lines else ""
    return Probe("Xid", not lines, lines[-1] if lines else "none", meaning)


def xid_lines(kernel_log: str) -> list[str]:
    """The lines of a kernel's log in which the driver reports a device fault."""
    return [line.strip() for line in kernel_log.splitlines() if re.search(r"NVRM: Xid .*: \d+", line)]


def nvlink() -> Probe:
    """Probe of the NVLink links between the GPUs: none may be inactive."""
    status = _nvidia_smi("nvlink", "--status")
    if status is None or "Link" not in status:
        return not_here("NVLink", "none")
    down = [line.strip() for line in status.splitlines() if "inactive" in line.lower()]
    meaning = "collectives inside the node fall back to PCIe: reset the devices or drain the node" if down else ""
    return Probe("NVLink", not down, f"{len(down)} links inactive" if down else "all links active", meaning)


def infiniband(root: Path = INFINIBAND, wanted: str = "") -> Probe:
    """Probe of the InfiniBand ports.

    wanted: adapters by name (NCCL_IB_HCA); without, one active port is enough: some ports have no cable.
    """
    states = {
        f"{port.parents[1].name}:{port.name}": (port / "state").read_text(encoding="utf-8").strip()
        for port in sorted(root.glob("*/ports/*"))
    }
    if not states:
        return not_here("InfiniBand", "none")
    names = (wanted or os.environ.get("NCCL_IB_HCA", "")).lstrip("^=").split(",")
    named = [name.partition(":")[0] for name in names if name]
    is_wanted = {port: port.partition(":")[0] in named for port in states}
    active = {port: "ACTIVE" in state for port, state in states.items()}
    ok = all(active[port] for port in states if is_wanted[port]) if any(is_wanted.values()) else any(active.values())
    value = ", ".join(f"{port} {state.partition(': ')[2] or state}" for port, state in states.items())
    return Probe(
        "InfiniBand", ok, value, "" if ok else "NCCL falls back to TCP or hangs: check cable and subnet manager"
    )


def versions() -> dict[str, str]:
    """The versions that must be equal on all nodes; packages that are not installed are left out."""
    by_name = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return by_name | ({"NVIDIA driver": driver.split("\n")[0].strip()} if driver else {})


def _names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory)) if directory.is_dir() else []


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


def _nvidia_smi(*arguments: str) -> str | None:
    return _run("nvidia-smi", *arguments)


def _run(*command: str) -> str | None:
    """The output of a command; None where there is no such command, or it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
