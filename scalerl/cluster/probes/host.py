"""Probes of the machine beside its GPUs: disk space, shared and locked memory, compilers of kernels at run time."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from scalerl.base.byte_units import GIB
from scalerl.base.cuda_toolkit import find_cuda_home, find_ninja
from scalerl.cluster.probes.finding import Finding
from scalerl.cluster.probes.hardware import INFINIBAND

MIN_FREE_DISK_GIB = 5.0
MIN_SHM_GIB = 1.0
# Open files of one process: Ray and servers hold a file for each connection.
MIN_OPEN_FILES = 4096
# Registered memory of an InfiniBand adapter counts as locked.
MIN_LOCKED_GIB = 1.0


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
