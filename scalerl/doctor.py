"""The command `scalerl doctor`: reports what is installed on this machine, what is missing, and the consequences."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import scalerl
from scalerl import nvidia
from scalerl.nvidia import NvidiaDevice, find_nvidia_device

GIB = 1 << 30
IMPORT_TIMEOUT_S = 180.0
PROBES_AT_A_TIME = 4
MIN_FREE_DISK_GIB = 5.0
MIN_SHM_GIB = 1.0


@dataclass(frozen=True)
class Package:
    """A package to check.

    probe: Python code that fails when the package does not work here.  without: the consequence of its absence.
    """

    name: str
    probe: str
    without: str


# Packages without which the main job cannot run.
REQUIRED = (
    Package("torch", "import torch", "nothing runs"),
    Package("numpy", "import numpy", "nothing runs"),
    Package("pyarrow", "import pyarrow.parquet", "no data can be read"),
    Package("transformers", "from transformers import AutoTokenizer, AutoConfig", "no tokenizer can be loaded"),
    Package("safetensors", "import safetensors.torch", "no model can be loaded"),
    Package("hydra-core", "import hydra, omegaconf", "no configuration can be read"),
    Package("mlflow", "import mlflow", "no run can be recorded"),
    Package("ray", "import ray", "no controller"),
    Package("megatron-core", "import megatron.core.parallel_state, megatron.core.dist_checkpointing", "no training"),
    Package(
        "sglang",
        # As the server process does: its environment must be set before the interpreter starts.
        "import os, sys, torch; from scalerl.servers.sglang.cpu_shim import shim_environment; "
        "env = {} if torch.cuda.is_available() else shim_environment(); "
        "os.execve(sys.executable, [sys.executable, '-c', 'import sglang.srt.entrypoints.engine'], "
        "{**os.environ, **env})",
        "only actor_rollout_ref.rollout.name=embedded (small models)",
    ),
)

# Packages that are used if they are installed.
OPTIONAL = (
    Package(
        "transformer-engine",
        "import transformer_engine.pytorch",
        "megatron.cp_comm_type cannot be set (attention is torch's, context parallelism scalerl's own); apex's or "
        "torch's Adam",
    ),
    Package("apex", "import apex.multi_tensor_apply, amp_C", "torch's Adam and gradient clipping: slower updates"),
    Package("flash-attn", "import flash_attn", "transformer-engine's attention has the kernels of cuDNN only"),
    Package(
        "torch_memory_saver",
        "import torch_memory_saver",
        "the rollout server cannot give its memory back while the trainer computes: set a lower "
        "actor_rollout_ref.rollout.gpu_memory_utilization and free_cache_engine=False",
    ),
    Package("sglang-kernel", "import sgl_kernel", "SGLang's native torch operators: slower"),
)

DEVICES_PROBE = """
import json, torch
gpus = []
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        gpus.append([p.name, p.total_memory])
print(json.dumps({"gpus": gpus, "cuda": torch.version.cuda}))
"""


@dataclass(frozen=True)
class Probe:
    """The result of a package's probe.  error: the last line of the failure; None when the package works."""

    package: Package
    version: str | None
    error: str | None


def run_python(code: str, timeout_s: float = IMPORT_TIMEOUT_S) -> tuple[str, str | None]:
    """Runs code in a separate interpreter; returns its standard output and an error, also if it crashed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s, env=env,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"import takes more than {timeout_s:g} s"
    if done.returncode == 0:
        return done.stdout, None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "no message"
    if done.returncode < 0:
        return done.stdout, f"killed by signal {-done.returncode}: {last}"
    return done.stdout, last


def probe(package: Package) -> Probe:
    try:
        version = importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    _, error = run_python(package.probe)
    return Probe(package, version, error)


def describe_devices(gpus: Sequence[tuple[str, int]]) -> list[str]:
    lines = [f"{i}: {name}, {memory / GIB:.0f} GiB" for i, (name, memory) in enumerate(gpus)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [*(lines or ["no GPU"]), f"CPU: {cores} cores, {memory / GIB:.0f} GiB memory"]


def describe_platform(gpus: Sequence[object], cuda: str | None, device: NvidiaDevice | None) -> str:
    """Describes if the CPU platform is on.

    cuda: the version that torch is built for.  device: the device that the file system shows.
    """
    if gpus:
        return f"off: CUDA {cuda} is used"
    if device is not None:
        return (
            f"WARNING: there is an NVIDIA device (driver {device.driver or 'unknown'}; {', '.join(device.signs)}), and "
            f"torch, built for {f'CUDA {cuda}' if cuda else 'the CPU alone'}, sees none: trainer.device=auto is refused"
        )
    return "on: no GPU, so Megatron runs on the CPU with gloo and a device is a process"


def describe_space() -> list[str]:
    """Describes the free space where Ray, checkpoints and the object store write, with warnings if it is little."""
    lines = []
    disks = ((Path.cwd(), MIN_FREE_DISK_GIB), (Path(tempfile.gettempdir()), MIN_FREE_DISK_GIB))
    for directory, least_gib in (*disks, (Path("/dev/shm"), MIN_SHM_GIB)):
        if not directory.exists():
            lines.append(f"{directory}: does not exist")
            continue
        free_gib = shutil.disk_usage(directory).free / GIB
        warning = f"   WARNING: less than {least_gib:g} GiB" if free_gib < least_gib else ""
        lines.append(f"{directory}: {free_gib:.1f} GiB free{warning}")
    return lines


def _section(title: str, lines: Sequence[str]) -> None:
    print(title)
    for line in lines:
        print(f"  {line}")


def _required_line(result: Probe) -> str:
    state = "ok" if result.error is None else f"FAILS: {result.error}"
    return f"{result.package.name:<20} {result.version or '-':<14} {state}"


def _optional_line(result: Probe) -> str:
    name, version = result.package.name, result.version or "-"
    if result.error is None:
        return f"{name:<20} {version:<14} ok"
    # A broken package is another problem than a missing one.
    state = "missing" if result.version is None else f"FAILS: {result.error}"
    return f"{name:<20} {version:<14} {state}; without it: {result.package.without}"


def run_doctor(required: Sequence[Package] = REQUIRED, optional: Sequence[Package] = OPTIONAL) -> int:
    """Prints the report; returns 0 when the main job can run here, 1 when a required package does not import."""
    _section("scalerl", [f"{scalerl.__version__} in {Path(scalerl.__file__).parent}"])
    _section("python", [f"{platform.python_version()} {sys.executable}", platform.platform()])

    out, error = run_python(DEVICES_PROBE)
    devices = json.loads(out) if error is None else {"gpus": [], "cuda": None}
    _section("devices", describe_devices(devices["gpus"]))
    on_cpu = "unknown: torch does not import"
    if error is None:
        on_cpu = describe_platform(
            devices["gpus"], devices["cuda"], None if nvidia.are_hidden() else find_nvidia_device()
        )
    _section("CPU platform", [on_cpu])

    with ThreadPoolExecutor(max_workers=PROBES_AT_A_TIME) as pool:
        results = list(pool.map(probe, required))
        optional_results = list(pool.map(probe, optional))
    _section("required", [_required_line(result) for result in results])
    _section("optional", [_optional_line(result) for result in optional_results])
    _section("space", describe_space())

    failed = [result for result in results if result.error is not None]
    if not failed:
        _section("result", ["the main job can run here"])
        return 0
    lines = ["the main job cannot run here:"]
    for result in failed:
        name = result.package.name
        lines.append(f"  {name}: {result.error}")
        lines.append(f"    without it: {result.package.without}")
    lines.append("repair with `make setup` (CPU), or requirements/gpu.txt on a GPU machine")
    _section("result", lines)
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `scalerl doctor`, which takes no options."""
    argparse.ArgumentParser(prog="scalerl doctor", description=__doc__).parse_args(argv)
    return run_doctor()


if __name__ == "__main__":
    sys.exit(main())
