"""Detection of NVIDIA devices without torch, which does not see every device of the machine."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

# Environment variable with the devices that a process may use.
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_DEVICE_FILE = re.compile(r"/nvidia\d+$")
_DRIVER_FILE, _DRIVER_DEVICES = "proc/driver/nvidia/version", "proc/driver/nvidia/gpus"
_TOOL_FOLDERS = ("usr/bin", "usr/local/bin", "usr/local/nvidia/bin", "usr/lib/wsl/lib")
_ANSWER_S = 20.0
_DRIVER_VERSION = re.compile(r"Kernel Module\b.*?\s(\d+\.\d+(?:\.\d+)?)\s")


@dataclass(frozen=True)
class NvidiaDevice:
    """An NVIDIA device.  driver: its version; None if the system does not tell.  signs: files that show the device."""

    driver: str | None
    signs: tuple[str, ...]


def find_nvidia_device(root: Path = Path("/")) -> NvidiaDevice | None:
    """Looks for an NVIDIA device; None if no file shows one.  root: root of the file system."""
    signs = sorted(str(path) for path in (root / "dev").glob("nvidia[0-9]*"))
    driver = None
    if (version_file := root / _DRIVER_FILE).exists():
        if signs or _driver_has_devices(root):
            signs.append(str(version_file))
        version = _DRIVER_VERSION.search(version_file.read_text(encoding="utf-8", errors="replace"))
        driver = version.group(1) if version else None
    tools = [root / folder / "nvidia-smi" for folder in _TOOL_FOLDERS]
    # A login node has the tool, and perhaps the driver, of the nodes with GPUs.
    signs += [str(tool) for tool in tools if tool.exists() and (signs or _lists_devices(tool))]
    return NvidiaDevice(driver, tuple(signs)) if signs else None


def _driver_has_devices(root: Path) -> bool:
    """Whether the driver lists a device; True for a driver without a list, which nobody installs without a device."""
    devices = root / _DRIVER_DEVICES
    return not devices.is_dir() or any(devices.iterdir())


@functools.cache
def _lists_devices(tool: Path) -> bool:
    """Whether nvidia-smi lists a device; True too if it does not answer in time, as it then waits for a device."""
    try:
        done = subprocess.run([tool, "--list-gpus"], capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        return True
    except OSError:
        return False
    return re.search(r"^GPU \d+:", done.stdout, re.MULTILINE) is not None


def count_devices(root: Path = Path("/")) -> int:
    """The number of NVIDIA devices that this process may use; 1 if there are some and no file shows how many."""
    if (visible := os.environ.get(VISIBLE_DEVICES)) is not None:
        return 0 if are_hidden() else len(visible.split(","))
    device = find_nvidia_device(root)
    return 0 if device is None else max(1, sum(bool(_DEVICE_FILE.search(sign)) for sign in device.signs))


def are_hidden() -> bool:
    """True if the user has hidden the devices from this process."""
    return os.environ.get(VISIBLE_DEVICES) in ("", "-1")


def hide() -> None:
    """Hides the devices from this process, unless it has used one already, and from those that it starts."""
    os.environ[VISIBLE_DEVICES] = ""
