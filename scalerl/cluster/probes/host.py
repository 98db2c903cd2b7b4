"""Probes of a machine: space, limits, compilers, and faults of its hardware.

Faults are those that NVIDIA's driver, the kernel and InfiniBand adapters report. The probe of what the machine does not
have says "not here", and passes.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scalerl.base.files import GIB
from scalerl.base.nvidia import find_cuda_home, find_ninja
from scalerl.cluster.probes.finding import Finding

MIN_FREE_DISK_GIB = 5.0
MIN_SHM_GIB = 1.0
# Open files of one process: Ray and servers hold a file for each connection.
MIN_OPEN_FILES = 4096
# Registered memory of an InfiniBand adapter counts as locked.
MIN_LOCKED_GIB = 1.0
COMMAND_TIMEOUT_S = 60.0
# Errors of the driver before this belong to another job.
XID_SINCE = "1 hour ago"
# Errors that a program makes, or the end of its processes: an exception of the program's kernel, a wrong address, a
# stopped channel, what is cleaned up after it. They say nothing of the device.
# https://docs.nvidia.com/deploy/xid-errors/index.html
APPLICATION_XIDS = frozenset({13, 31, 43, 45})
INFINIBAND = Path("/sys/class/infiniband")


def check_disk(directory: Path, min_gib: float = MIN_FREE_DISK_GIB) -> Finding:
    """Checks the free space of a directory to which Ray, checkpoints and copies of data and models are written."""
    free_gib = shutil.disk_usage(directory).free / GIB
    value = f"{free_gib:.1f} GiB free"
    if free_gib < min_gib:
        return Finding(
            str(directory), False, value,
            f"less than {min_gib:g} GiB: checkpoints, Ray's spilling and copies of models may not fit; clean up what "
            "other jobs left",
        )  # fmt: skip
    return Finding(str(directory), True, value, "checkpoints, logs and copies of models go there")


def check_disks() -> list[Finding]:
    """Checks the free space of the working directory and of the directory of temporary files."""
    directories = dict.fromkeys((Path.cwd(), Path(tempfile.gettempdir())))
    return [check_disk(directory, MIN_FREE_DISK_GIB) for directory in directories]


def check_shared_memory(directory: Path = Path("/dev/shm"), min_gib: float = MIN_SHM_GIB) -> Finding:
    """Checks the space for Ray's object store and for what ranks of a node hand to each other and to servers."""
    if not directory.exists():
        return Finding(str(directory), False, "does not exist", "Ray and NCCL need it: mount a tmpfs there", True)
    free_gib = shutil.disk_usage(directory).free / GIB
    value = f"{free_gib:.1f} GiB free"
    if free_gib < min_gib:
        return Finding(
            str(directory), False, value,
            f"less than {min_gib:g} GiB: Ray's object store goes to disk, and NCCL and weight updates fail; clean up "
            "what other jobs left, or enlarge it (docker run --shm-size=64g or --ipc=host)",
        )  # fmt: skip
    return Finding(str(directory), True, value, "Ray's object store, NCCL and weight updates share memory there")


def check_open_files() -> Finding:
    """Checks how many files a process may open at most (`ulimit -Hn`)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    value = "unlimited" if unlimited else str(hard)
    if not unlimited and hard < MIN_OPEN_FILES:
        why = f"below {MIN_OPEN_FILES}: Ray and servers hold a file for each connection; raise it (slurmd: LimitNOFILE)"
        return Finding("open files", False, value, why)
    return Finding("open files", True, value, "Ray and servers hold a file for each connection")


def check_locked_memory(infiniband: Path = INFINIBAND) -> Finding:
    """Checks the limit of memory that InfiniBand may register (`ulimit -l`)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    value = "unlimited" if unlimited else f"{soft / 2**20:.0f} MiB"
    if unlimited:
        return Finding("locked memory", True, value, "InfiniBand can register buffers, the host can pin them")
    if not infiniband.is_dir() or not any(infiniband.iterdir()):
        return Finding("locked memory", True, value, "no InfiniBand here, so nothing asks for more")
    if soft < MIN_LOCKED_GIB * GIB:
        return Finding(
            "locked memory", False, value,
            "this machine has InfiniBand, where NCCL fails to register buffers over this limit (ibv_reg_mr: cannot "
            "allocate memory): raise it (ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity of "
            "slurmd)",
        )  # fmt: skip
    return Finding("locked memory", True, value, "InfiniBand can register that much")


def check_compiler() -> Finding:
    """Compiles one C++20 file that includes Python.h, as Triton, Inductor and SGLang do."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    meaning = "on a GPU Triton, torch.compile and SGLang compile kernels at run time"
    install = "install g++ 11 or newer and Python's headers (apt-get install g++ python3-dev)"
    if compiler is None:
        return Finding("C++ compiler", False, "none", f"{meaning}: {install}")
    include = sysconfig.get_path("include")
    source = "#include <Python.h>\n#include <concepts>\nstatic_assert(std::integral<int>);\nint main() { return 0; }\n"
    with tempfile.TemporaryDirectory(prefix="scalerl-probe-") as directory:
        path = Path(directory) / "probe.cpp"
        path.write_text(source)
        built = subprocess.run(
            [compiler, "-std=c++20", f"-I{include}", "-c", str(path), "-o", str(path.with_suffix(".o"))],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    if built.returncode == 0:
        return Finding("C++ compiler", True, f"{compiler}, {include}/Python.h", meaning)
    errors = [line for line in built.stderr.splitlines() if "error" in line]
    return Finding("C++ compiler", False, f"{compiler}: {(errors or ['fails'])[0].strip()}", f"{meaning}: {install}")


def check_ninja() -> Finding:
    """Looks for ninja, with which servers compile kernels."""
    ninja = find_ninja()
    meaning = "SGLang and FlashInfer compile kernels with it when a server starts"
    if ninja is None:
        return Finding("ninja", False, "none", f"{meaning}, and no server starts: pip install ninja")
    return Finding("ninja", True, str(ninja), meaning)


def check_nvcc(torch_cuda: str | None) -> Finding:
    """Looks for nvcc and compares its version with torch's.

    torch_cuda: version of CUDA that torch is built for; None: without CUDA, or not compared.
    """
    meaning = "SGLang and FlashInfer compile kernels with it when a server starts"
    home = find_cuda_home()
    if home is None:
        return Finding("nvcc", False, "none", f"{meaning}, and no server starts: pip install -r requirements/gpu.txt")
    try:
        out = subprocess.run(
            [str(home / "bin" / "nvcc"), "--version"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("nvcc", False, f"{home}/bin/nvcc: {error}", f"{meaning}: set CUDA_HOME to a CUDA toolkit")
    release = re.search(r"release (\d+)\.(\d+)", out)
    version = ".".join(release.groups()) if release else "of unknown version"
    value = f"{version} in {home}"
    if torch_cuda is not None and release and release[1] != torch_cuda.split(".")[0]:
        return Finding(
            "nvcc", False, value,
            f"torch is built for CUDA {torch_cuda}: kernels of another major version do not load; set CUDA_HOME",
        )  # fmt: skip
    return Finding("nvcc", True, value, meaning)


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
    """The lines of a kernel's log in which the driver reports a fault of a device; those of a program are left out."""
    faults = ((line.strip(), re.search(r"NVRM: Xid \([^)]*\): (\d+)", line)) for line in kernel_log.splitlines())
    return [line for line, xid in faults if xid is not None and int(xid[1]) not in APPLICATION_XIDS]


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
    """Reads the states of the InfiniBand ports that NCCL uses; with NCCL_IB_DISABLE=1 it uses none.

    wanted: adapters, written as NCCL_IB_HCA has them. Of those that are named by their whole name each must be active;
    of the others that NCCL may use one is enough: some ports have no cable.
    """
    name, meaning = "InfiniBand", "NCCL sends between nodes over it"
    states = {
        f"{port.parents[1].name}:{port.name}": (port / "state").read_text(encoding="utf-8").strip()
        for port in sorted(root.glob("*/ports/*"))
    }
    if not states:
        return Finding(name, True, "not here: none", meaning)
    value = ", ".join(f"{port} {state.partition(': ')[2] or state}" for port, state in states.items())
    if os.environ.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return Finding(name, True, f"{value}; not used (NCCL_IB_DISABLE)", "NCCL sends between nodes over TCP")
    active = {port: "ACTIVE" in state for port, state in states.items()}
    used, demanded = used_ports(list(states), wanted or os.environ.get("NCCL_IB_HCA", ""))
    if not used:
        return Finding(name, False, value, "NCCL_IB_HCA leaves NCCL none of them: correct it")
    if not (all(active[port] for port in demanded) and any(active[port] for port in used)):
        return Finding(name, False, value, "NCCL falls back to TCP or hangs: check cable and subnet manager")
    return Finding(name, True, value, meaning)


def used_ports(ports: Sequence[str], wanted: str) -> tuple[list[str], list[str]]:
    """Selects the ports that NCCL may use, and those of them that are named by the whole name of their adapter.

    ports: ADAPTER:PORT.  wanted: as NCCL_IB_HCA: names, which are beginnings of an adapter's name; =names, which are
    whole ones; ^names and ^=names, of those that are not used. A name may end in :PORT.
    """
    leaves_out, names = wanted.startswith("^"), wanted.removeprefix("^")
    is_whole, names = names.startswith("="), names.removeprefix("=").strip(",")
    if not names:
        return list(ports), []
    given = [each.partition(":") for each in names.split(",") if each]

    def is_named(port: str, whole: bool) -> bool:
        adapter, _, number = port.partition(":")
        return any(
            (adapter == name if whole else adapter.startswith(name)) and named_number in ("", number)
            for name, _, named_number in given
        )

    used = [port for port in ports if is_named(port, is_whole) != leaves_out]
    return used, [] if leaves_out else [port for port in used if is_named(port, True)]


def _output(*command: str) -> str | None:
    """The output of a command; None where there is no such command, or it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
