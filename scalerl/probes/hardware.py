"""Probes of faults of a machine's hardware, as NVIDIA's driver, the kernel and InfiniBand adapters report them.

The probe of what the machine does not have says "not here", and passes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from scalerl.probes.finding import Finding

COMMAND_TIMEOUT_S = 60.0
# Errors of the driver before this belong to another job.
XID_SINCE = "1 hour ago"
INFINIBAND = Path("/sys/class/infiniband")


def nvidia_smi(*arguments: str) -> str | None:
    """The output of nvidia-smi; None where there is none, or it fails or hangs."""
    return _output("nvidia-smi", *arguments)


def check_device_count(wanted: int) -> Finding:
    """Counts the GPUs that the driver shows.  wanted: the fewest that there must be."""
    name, meaning = "devices", "each rank and each part of a server has one"
    if shutil.which("nvidia-smi") is None:
        return Finding(name, True, "not here: no nvidia-smi", meaning)
    # An nvidia-smi that fails shows no device.
    listed = nvidia_smi("--list-gpus") or ""
    num_gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
    if num_gpus < wanted:
        why = f"the job asks for {wanted}: a device fell off the bus, or the driver is down"
        return Finding(name, False, f"{num_gpus} GPUs", why, True)
    return Finding(name, True, f"{num_gpus} GPUs", meaning)


def check_memory_errors() -> Finding:
    """Reads the memory errors that the GPUs counted."""
    name, meaning = "ECC", "the memory of the devices can be trusted"
    fields = "index,ecc.errors.uncorrected.volatile.total,remapped_rows.failure,remapped_rows.pending"
    listed = nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if listed is None:
        return Finding(name, True, "not here: no nvidia-smi, or one that does not count them", meaning)
    if bad := bad_rows(listed):
        why = "memory of the device is failing: results are not to be trusted; drain the node"
        return Finding(name, False, "; ".join(bad), why)
    return Finding(name, True, "no uncorrected errors", meaning)


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


def check_driver_errors() -> Finding:
    """Looks in the kernel's log for device faults (Xid) that the driver reported."""
    name, meaning = "Xid", "the driver reported no fault of a device"
    log = _output("dmesg", "--since", XID_SINCE)
    if log is None:
        return Finding(name, True, "not here: the kernel's log cannot be read", meaning)
    if lines := xid_lines(log):
        why = "the driver reported a fault of a device: nvidia-smi -q, reset or drain the node"
        return Finding(name, False, lines[-1], why)
    return Finding(name, True, "none", meaning)


def xid_lines(kernel_log: str) -> list[str]:
    """The lines of a kernel's log in which the driver reports a device fault."""
    return [line.strip() for line in kernel_log.splitlines() if re.search(r"NVRM: Xid .*: \d+", line)]


def count_nvlinks() -> tuple[int, int] | None:
    """The numbers of active and inactive NVLinks of all GPUs; None where nvidia-smi does not tell."""
    status = nvidia_smi("nvlink", "--status")
    if status is None:
        return None
    links = [line for line in status.splitlines() if re.match(r"\s*Link \d+:", line)]
    inactive = sum("inactive" in line.lower() for line in links)
    return sum("GB/s" in line for line in links), inactive


def check_nvlinks() -> Finding:
    """Looks for NVLinks between the GPUs that are inactive."""
    name, meaning = "NVLink", "collectives inside the node go over them"
    links = count_nvlinks()
    if links is None or links == (0, 0):
        return Finding(name, True, "not here: none", meaning)
    active, inactive = links
    if inactive:
        why = "collectives inside the node fall back to PCIe: reset the devices or drain the node"
        return Finding(name, False, f"{inactive} of {active + inactive} links inactive", why)
    return Finding(name, True, f"{active} links active", meaning)


def check_infiniband(root: Path = INFINIBAND, wanted: str = "") -> Finding:
    """Reads the states of the InfiniBand ports.

    wanted: adapters by name (NCCL_IB_HCA); without, one active port is enough: some ports have no cable.
    """
    name, meaning = "InfiniBand", "NCCL sends between nodes over it"
    states = {
        f"{port.parents[1].name}:{port.name}": (port / "state").read_text(encoding="utf-8").strip()
        for port in sorted(root.glob("*/ports/*"))
    }
    if not states:
        return Finding(name, True, "not here: none", meaning)
    names = (wanted or os.environ.get("NCCL_IB_HCA", "")).lstrip("^=").split(",")
    named = [each.partition(":")[0] for each in names if each]
    is_wanted = {port: port.partition(":")[0] in named for port in states}
    active = {port: "ACTIVE" in state for port, state in states.items()}
    ok = all(active[port] for port in states if is_wanted[port]) if any(is_wanted.values()) else any(active.values())
    value = ", ".join(f"{port} {state.partition(': ')[2] or state}" for port, state in states.items())
    if not ok:
        return Finding(name, False, value, "NCCL falls back to TCP or hangs: check cable and subnet manager")
    return Finding(name, True, value, meaning)


def _output(*command: str) -> str | None:
    """The output of a command; None where there is no such command, or it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
