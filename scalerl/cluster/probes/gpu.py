"""Probes of the GPUs of a machine: driver, links between them, kernels, collectives, memory handed over."""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from scalerl.base import nvidia
from scalerl.base.nvidia import NvidiaDevice, toolkit_environment
from scalerl.cluster.probes.finding import Finding, run_interpreter, run_probe_program, side_by_side
from scalerl.cluster.probes.host import (
    check_compiler,
    check_device_count,
    check_driver_errors,
    check_infiniband,
    check_locked_memory,
    check_memory_errors,
    check_ninja,
    check_nvcc,
    check_nvlinks,
    check_open_files,
    check_shared_memory,
    count_nvlinks,
)
from scalerl.config.schema import FLASH_ATTENTION_IMPLS

if TYPE_CHECKING:
    from scalerl.parallel.flash_attention import Refusal

# The first driver of Linux that runs programs of a major version of CUDA (CUDA's release notes, "minor version
# compatibility").
FIRST_DRIVERS = {"11": (450, 80, 2), "12": (525, 60, 13), "13": (580, 65, 6)}
KERNEL_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Devices:
    """The devices that torch sees.

    gpus: name and bytes of each.  apart: pairs that do not reach each other's memory.  error: torch does not import.
    """

    torch: str | None
    cuda: str | None
    gpus: tuple[tuple[str, int], ...]
    apart: tuple[tuple[int, int], ...] = ()
    error: str | None = None


def find_devices() -> Devices:
    """Asks torch which devices it sees, in a separate process."""
    out, error = run_probe_program("devices")
    if error is not None:
        return Devices(None, None, (), error=error)
    seen = json.loads(out.splitlines()[-1])
    return Devices(
        seen["torch"], seen["cuda"], tuple((name, size) for name, size in seen["gpus"]),
        tuple((i, j) for i, j in seen["apart"]),
    )  # fmt: skip


def check_driver(devices: Devices, device: NvidiaDevice | None) -> Finding:
    """Whether torch sees the machine's GPUs, and if not, whether its driver is too old.

    device: what the file system shows; None where it shows none.
    """
    build = f"torch {devices.torch}, built {f'for CUDA {devices.cuda}' if devices.cuda else 'without CUDA'}"
    driver = device.driver if device is not None and device.driver is not None else "unknown"
    if devices.error is not None:
        return Finding("driver and CUDA", False, f"torch does not import: {devices.error}", "nothing runs", True)
    if devices.gpus:
        names = ", ".join(sorted({name for name, _ in devices.gpus}))
        value = f"driver {driver}, {build}, sees {len(devices.gpus)} GPU(s): {names}"
        return Finding("driver and CUDA", True, value, "ranks and servers run on them", True)
    value = f"driver {driver}, {build}, sees no GPU" if device is not None else f"no NVIDIA device; {build}"
    return Finding("driver and CUDA", False, value, _why_no_gpu(devices, device), True)


def _why_no_gpu(devices: Devices, device: NvidiaDevice | None) -> str:
    if device is None:
        return "runs are on the CPU; in a container, is the device passed on (docker run --gpus all)?"
    if devices.cuda is None:
        return "install a torch that is built for CUDA (docs/gpu.md)"
    if nvidia.are_hidden():
        return f"{nvidia.VISIBLE_DEVICES} hides the GPUs from this process: unset it"
    first = FIRST_DRIVERS.get(devices.cuda.split(".")[0])
    if first and device.driver and tuple(map(int, device.driver.split("."))) < first:
        needed = "{}.{}.{:02}".format(*first)
        return (
            f"CUDA {devices.cuda} needs driver {needed} or newer: update the driver, or install NVIDIA's cuda-compat "
            f"package for CUDA {devices.cuda} on a data center GPU"
        )
    return "has this user access to /dev/nvidia*, and are the driver's modules loaded (nvidia-smi)?"


def check_links(devices: Devices) -> Finding:
    """Checks how the GPUs of this machine reach each other's memory."""
    if len(devices.gpus) < 2:
        return Finding("links between GPUs", True, f"{len(devices.gpus)} GPU(s)", "none needed")
    if devices.apart:
        pairs = ", ".join(f"{i}-{j}" for i, j in devices.apart[:4])
        return Finding(
            "links between GPUs", False, f"{len(devices.apart)} pairs without access ({pairs} ...)",
            "tensor and expert parallelism go through the host's memory, several times slower: is NVIDIA's fabric "
            "manager running, is PCIe access control (ACS) on, is the machine a virtual one?",
        )  # fmt: skip
    counted = count_nvlinks()
    links = None if counted is None else counted[0]
    if links == 0:
        return Finding(
            "links between GPUs", False, "all reach each other, by PCIe alone",
            "tensor parallelism is slow without NVLink: prefer data and pipeline parallelism",
        )  # fmt: skip
    value = "all reach each other" + (f", {links} active NVLinks" if links else ", NVLink unknown (no nvidia-smi)")
    return Finding("links between GPUs", True, value, "tensor and expert parallelism go over them")


def check_kernel(devices: Devices) -> Finding:
    """Compiles and runs a kernel of SGLang's, with an empty cache, in the environment of a server."""
    name, meaning = "SGLang kernel", "every server compiles such kernels when it starts"
    if not devices.gpus:
        return Finding(name, False, "not tried: no GPU", meaning, True)
    with tempfile.TemporaryDirectory(prefix="scalerl-probe-") as cache:
        env = toolkit_environment() | {"SGLANG_JIT_CACHE_DIR": cache}
        out, error = run_probe_program("sglang_kernel", timeout_s=KERNEL_TIMEOUT_S, env=env)
    if error is not None:
        return Finding(name, False, error, f"{meaning}, and it would not", True)
    return Finding(name, True, f"compiled and right in {_last(out)['seconds']:.0f} s", meaning, True)


def check_transformer_engine(timeout_s: float = 180.0) -> Finding:
    """Imports Transformer Engine where it is installed: without its compiled part megatron does not import either."""
    name = "Transformer Engine"
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            name, True, "not installed",
            "attention and experts are torch's and context parallelism scalerl's own; megatron.cp_comm_type stays null "
            "and moe_experts_impl torch",
        )  # fmt: skip
    _, error = run_interpreter(["-c", "import transformer_engine.pytorch"], timeout_s)
    if error is None:
        meaning = "megatron.cp_comm_type and moe_experts_impl can be set; Adam is its fused one"
        return Finding(name, True, version, meaning, True)
    return Finding(
        name, False, f"{version}: {error}",
        "megatron imports it in every rank, and none starts: install its compiled parts too (docs/gpu.md), or "
        "pip uninstall transformer-engine", True,
    )  # fmt: skip


def try_flash_attention(*impls: str, head_sizes: Collection[int] = ()) -> dict[str, Refusal | None]:
    """Takes up implementations of FlashAttention as a rank would, each in a process; returns why one is refused.

    A process that crashes ends no other.  head_sizes: on a GPU, of the models; each implementation must compute the
    same as torch's own with them.
    """
    with ThreadPoolExecutor() as pool:
        return dict(zip(impls, pool.map(partial(_try_flash_attention, head_sizes), impls), strict=True))


def _try_flash_attention(head_sizes: Collection[int], impl: str) -> Refusal | None:
    from scalerl.parallel.flash_attention import Refusal

    out, error = run_probe_program(
        "flash_attention", impl, *map(str, sorted(set(head_sizes))), timeout_s=KERNEL_TIMEOUT_S
    )
    if error is not None:
        return Refusal(f"a process that tries it fails ({error})")
    refused = _last(out)
    return None if refused is None else Refusal(**refused)


def check_flash_attention(devices: Devices) -> Finding:
    """Finds which values of trainer.flash_attention_impl the GPUs of this machine and what is installed allow."""
    name, taken = "FlashAttention", "trainer.flash_attention_impl=auto takes {}".format
    if not devices.gpus:
        return Finding(name, True, "not tried: no GPU", taken("torch's own"))
    refusals = try_flash_attention(*FLASH_ATTENTION_IMPLS)
    allowed = [impl for impl, refusal in refusals.items() if refusal is None]
    value = "torch's own" + "".join(f", {impl}" for impl in allowed)
    return Finding(name, True, value, taken(allowed[0] if allowed else "torch's own"))


def check_collective(device: Literal["cuda", "cpu"], num_ranks: int) -> Finding:
    """Sums a tensor over processes, by NCCL on GPUs and by gloo on a CPU, and checks the values."""
    backend = "NCCL" if device == "cuda" else "gloo"
    name, meaning = f"{backend} collective", "gradients, weights and log-probs go between ranks so"
    if num_ranks == 0:
        return Finding(name, False, "not tried: no GPU", meaning, True)
    out, error = run_probe_program("collective", "--ranks", str(num_ranks), "--device", device)
    if error is not None:
        return Finding(name, False, error, f"{meaning}, and no run would start: NCCL_DEBUG=INFO says more", True)
    sent = _last(out)
    # Bytes that each rank sends, and receives, in a sum over a ring.
    rate = 2 * (num_ranks - 1) / num_ranks * sent["bytes"] / sent["seconds"] / 1e9
    speed = "" if num_ranks == 1 else f", {rate:.1f} GB/s"
    return Finding(name, True, f"right on {num_ranks} rank(s){speed}", meaning, True)


def check_ipc(device: Literal["cuda", "cpu"], has_device: bool = True) -> Finding:
    """Hands memory to another process, which changes it: CUDA's handles on a GPU, shared memory on a CPU."""
    name = "memory handed over"
    meaning = "weights go from the trainer to the servers of its devices so"
    if not has_device:
        return Finding(name, False, "not tried: no GPU", meaning, True)
    out, error = run_probe_program("ipc", "--device", device)
    if error is not None:
        return Finding(
            name, False, error,
            f"{meaning}: in a container give the processes one IPC namespace (--ipc=host), and do not set "
            "backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF", True,
        )  # fmt: skip
    return Finding(name, True, f"{_last(out)['bytes'] >> 20} MiB, seen by both", meaning, True)


def health_findings(num_gpus: int) -> Iterator[Finding]:
    """Checks devices, links, adapters and limits of this machine, which may fail from one day to the next.

    num_gpus: the fewest GPUs that there must be.
    """
    yield check_device_count(num_gpus)
    yield check_memory_errors()
    yield check_driver_errors()
    yield check_nvlinks()
    yield check_infiniband()
    yield check_locked_memory()
    yield check_open_files()


def gpu_findings(devices: Devices | None = None) -> Iterator[Finding]:
    """Tries everything that a run on the GPUs of this machine needs; some probes take a minute."""
    devices = devices or find_devices()
    num_gpus = len(devices.gpus)
    yield check_driver(devices, nvidia.find_nvidia_device())
    yield from health_findings(num_gpus)
    yield check_links(devices)
    yield check_shared_memory()
    yield from side_by_side([check_compiler, check_ninja, partial(check_nvcc, devices.cuda)])
    # One after the other: each wants the devices for itself.
    yield check_transformer_engine()
    yield check_flash_attention(devices)
    yield check_kernel(devices)
    yield check_collective("cuda", num_gpus)
    yield check_ipc("cuda", num_gpus > 0)


def start_violations(device: str, *, serves: bool) -> Iterator[str]:
    """One sentence for each problem that would end a run on this machine at its start; takes no time of a GPU.

    device: cuda or cpu.  serves: the run starts SGLang servers.
    """
    probes: list[Callable[[], Finding]] = [check_transformer_engine]
    if device == "cuda":
        # On a CPU a run may have less: Ray's store goes to disk then, and a sync says what it lacks.
        probes += [check_compiler, check_shared_memory]
        if serves:
            import torch

            probes += [check_ninja, partial(check_nvcc, torch.version.cuda)]
    for finding in side_by_side(probes):
        if not finding.ok:
            yield f"{finding.name}: {finding.value}; {finding.meaning}"


def _last(out: str) -> Any:
    return json.loads(out.splitlines()[-1])
