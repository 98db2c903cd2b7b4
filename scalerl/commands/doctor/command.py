"""The command `scalerl doctor`: reports what is installed on this machine, what is missing, and the consequences."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import scalerl
from scalerl.base import nvidia
from scalerl.base.files import GIB
from scalerl.base.nvidia import NvidiaDevice, find_nvidia_device
from scalerl.cluster.probes import Finding, side_by_side
from scalerl.cluster.probes.gpu import Devices, check_transformer_engine, find_devices, gpu_findings
from scalerl.cluster.probes.host import check_disks, check_shared_memory
from scalerl.commands.doctor.packages import OPTIONAL, REQUIRED, Package, check_import, check_installed
from scalerl.errors import CommandParser


def describe_devices(gpus: Sequence[tuple[str, int]]) -> list[str]:
    """One line for each GPU (name and bytes of memory), and one for the CPU and the machine's memory."""
    lines = [f"{i}: {name}, {memory / GIB:.0f} GiB" for i, (name, memory) in enumerate(gpus)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [*(lines or ["no GPU"]), f"CPU: {cores} cores, {memory / GIB:.0f} GiB memory"]


def describe_platform(devices: Devices, device: NvidiaDevice | None) -> str:
    """Says whether the CPU platform is on, and why.  device: the device that the file system shows."""
    if devices.error is not None:
        return "unknown: torch does not import"
    if devices.gpus:
        return f"off: CUDA {devices.cuda} is used"
    if device is not None:
        return (
            f"WARNING: there is an NVIDIA device (driver {device.driver or 'unknown'}; {', '.join(device.signs)}), and "
            f"torch, built for {f'CUDA {devices.cuda}' if devices.cuda else 'the CPU alone'}, sees none: "
            "trainer.device=auto is refused; scalerl doctor --gpu says why"
        )
    return "on: no GPU, so Megatron runs on the CPU with gloo and a device is a process"


def package_line(finding: Finding) -> str:
    """The line of the report about one package."""
    return f"{finding.name:<20} {finding.value}{f'; {finding.meaning}' if finding.meaning else ''}"


def check_packages(packages: Sequence[Package], import_all: bool, on_gpu: bool) -> list[Finding]:
    """The findings of these packages, in their order.

    import_all: imports each, which takes half a minute of processor time; else only the light ones.
    """
    return side_by_side(
        [
            partial(check_import, package, on_gpu)
            if import_all or package.is_light
            else partial(check_installed, package)
            for package in packages
        ]
    )


def run_doctor(
    required: Sequence[Package] = REQUIRED,
    optional: Sequence[Package] = OPTIONAL,
    *,
    import_all: bool = False,
    gpu: bool = False,
) -> int:
    """Prints the report; returns 0 when the main job can run here, 1 when something that it needs does not work."""
    _section("scalerl", [f"{scalerl.__version__} in {Path(scalerl.__file__).parent}"])
    _section("python", [f"{platform.python_version()} {sys.executable}", platform.platform()])

    with ThreadPoolExecutor(max_workers=2) as pool:
        device_probe = pool.submit(find_devices)
        checks = pool.submit(check_packages, [*required, *optional], False, False) if not import_all else None
        devices = device_probe.result()
        results = checks.result() if checks else check_packages([*required, *optional], True, bool(devices.gpus))
    results = [_seen_by_torch(result, devices) for result in results]
    _section("devices", describe_devices(devices.gpus))
    _section("CPU platform", [describe_platform(devices, None if nvidia.are_hidden() else find_nvidia_device())])
    _section("required", map(package_line, results[: len(required)]))
    _section("optional", map(package_line, results[len(required) :]))
    host = [*check_disks(), check_shared_memory()]
    _section("space", map(str, host))
    if gpu:
        print("GPU")
        for finding in gpu_findings(devices):
            print(f"  {finding}", flush=True)
            host.append(finding)
    elif any(result.name == "transformer-engine" and result.ok for result in results):
        host.append(check_transformer_engine())
        _section("transformer-engine", [str(host[-1])])

    failed = [finding for finding in [*results, *host] if finding.ends_a_run]
    if not failed:
        how = "" if import_all else " (as far as versions tell: scalerl doctor --imports imports every package)"
        _section("result", [f"the main job can run here{how}"])
        return 0
    lines = ["the main job cannot run here:"]
    for finding in failed:
        lines += [f"  {finding.name}: {' '.join(finding.value.split())}", f"    {finding.meaning}"]
    lines.append("repair with `make setup` (CPU), or as docs/gpu.md says on a GPU machine")
    _section("result", lines)
    return 1


def _seen_by_torch(result: Finding, devices: Devices) -> Finding:
    """The finding about torch, with the error of its import if the probe of the devices failed to import it."""
    if result.name != "torch" or devices.error is None or not result.ok:
        return result
    return Finding("torch", False, f"FAILS: {devices.error}", "without it: nothing runs", needed=True)


def _section(title: str, lines: Iterable[str]) -> None:
    print(title)
    for line in lines:
        print(f"  {line}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `scalerl doctor`."""
    parser = CommandParser(prog="scalerl doctor", description=__doc__)
    parser.add_argument("--imports", action="store_true", help="import every package: half a minute of processor time")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="try what runs on GPUs need: a kernel, a collective, memory handed over",
    )
    options = parser.parse_args(argv)
    return run_doctor(import_all=options.imports, gpu=options.gpu)


if __name__ == "__main__":
    sys.exit(main())
