"""What can be found out about a node before a job uses it. What the machine does not have is "not here", and passes."""

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
# Of one process: Ray and servers hold a file for each connection.
MIN_OPEN_FILES = 4096
# Registered memory of an InfiniBand adapter counts as locked.
MIN_LOCKED_GIB = 1.0
# Errors of the driver that are this old belong to another job.
XID_SINCE = "1 hour ago"
INFINIBAND = Path("/sys/class/infiniband")
PACKAGES = ("scalerl", "torch", "ray", "megatron-core", "sglang", "transformers", "transformer-engine")


@dataclass(frozen=True)
class Probe:
    """value: what was found.  meaning: of a probe that is not ok, what it does to a run and what to do."""

    name: str
    ok: bool
    value: str
    meaning: str = ""


@dataclass(frozen=True)
class Limits:
    """gpus: devices that each node must have.  needs: a file of paths that it must be able to read."""

    gpus: int = 0
    min_disk_gib: float = 5.0
    min_shm_gib: float = 1.0
    needs: Path | None = None


def not_here(name: str, what: str) -> Probe:
    return Probe(name, True, f"not here: {what}")


def all_probes(limits: Limits) -> list[Probe]:
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
    try:
        free = shutil.disk_usage(path).free / GIB
    except OSError as error:
        return Probe(name, False, str(error), use)
    meaning = "" if free >= min_gib else f"less than {min_gib:g} GiB: {use}; clean up what other jobs left"
    return Probe(name, free >= min_gib, f"{free:.1f} GiB free in {path}", meaning)


def open_files() -> Probe:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ok = hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES
    return Probe("open files", ok, _limit(hard), "" if ok else f"below {MIN_OPEN_FILES}: raise LimitNOFILE of slurmd")


def locked_memory(infiniband: Path = INFINIBAND) -> Probe:
    if not _names(infiniband):
        return not_here("locked memory", "no InfiniBand, which needs it")
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    ok = hard == resource.RLIM_INFINITY or hard >= MIN_LOCKED_GIB * GIB
    meaning = "" if ok else "NCCL cannot register memory with the adapter: LimitMEMLOCK=infinity of slurmd"
    return Probe("locked memory", ok, _limit(hard), meaning)


def devices(wanted: int) -> Probe:
    if shutil.which("nvidia-smi") is None:
        return not_here("devices", "no nvidia-smi")
    # One that fails shows none.
    listed = _nvidia_smi("--list-gpus") or ""
    found = sum(line.startswith("GPU ") for line in listed.splitlines())
    meaning = "" if found >= wanted else f"the job asks for {wanted}: a device fell off the bus, or the driver is down"
    return Probe("devices", found >= wanted, f"{found} GPUs", meaning)


def memory_errors() -> Probe:
    fields = "index,ecc.errors.uncorrected.volatile.total,remapped_rows.failure,remapped_rows.pending"
    listed = _nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if listed is None:
        return not_here("ECC", "no nvidia-smi, or one that does not count them")
    bad = bad_rows(listed)
    meaning = "memory of the device is failing: results are not to be trusted; drain the node" if bad else ""
    return Probe("ECC", not bad, "; ".join(bad) or "no uncorrected errors", meaning)


def bad_rows(csv: str) -> list[str]:
    """csv: index, uncorrected errors, remapping failed, remapping pending; a device that counts none says [N/A]."""
    found = []
    for line in csv.splitlines():
        index, *counts = (word.strip() for word in line.split(","))
        if any(count.lower() not in ("0", "no", "[n/a]", "n/a", "") for count in counts):
            found.append(f"GPU {index}: {', '.join(counts)} (uncorrected, remapping failed, pending)")
    return found


def driver_errors() -> Probe:
    done = _run("dmesg", "--since", XID_SINCE)
    if done is None:
        return not_here("Xid", "the kernel's log cannot be read")
    lines = xid_lines(done)
    meaning = "the driver reported a fault of a device: nvidia-smi -q, reset or drain the node" if lines else ""
    return Probe("Xid", not lines, lines[-1] if lines else "none", meaning)


def xid_lines(kernel_log: str) -> list[str]:
    return [line.strip() for line in kernel_log.splitlines() if re.search(r"NVRM: Xid .*: \d+", line)]


def nvlink() -> Probe:
    status = _nvidia_smi("nvlink", "--status")
    if status is None or "Link" not in status:
        return not_here("NVLink", "none")
    down = [line.strip() for line in status.splitlines() if "inactive" in line.lower()]
    meaning = "collectives inside the node fall back to PCIe: reset the devices or drain the node" if down else ""
    return Probe("NVLink", not down, f"{len(down)} links inactive" if down else "all links active", meaning)


def infiniband(root: Path = INFINIBAND, wanted: str = "") -> Probe:
    """wanted: adapters by name (NCCL_IB_HCA); without, one that is active is enough: some ports have no cable."""
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
    """Of what must be equal on all nodes; of packages that are not installed nothing."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return found | ({"NVIDIA driver": driver.split("\n")[0].strip()} if driver else {})


def _names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory)) if directory.is_dir() else []


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


def _nvidia_smi(*arguments: str) -> str | None:
    return _run("nvidia-smi", *arguments)


def _run(*command: str) -> str | None:
    """Its output; None where there is no such command, or it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
