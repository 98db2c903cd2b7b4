"""NVIDIA devices of a machine, found without torch, and the CUDA toolkit and ninja by which servers compile kernels."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
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


def find_ninja() -> Path | None:
    """The ninja of this Python environment, whose programs need not be on PATH; else the one on PATH."""
    own = Path(sys.executable).parent / "ninja"
    if own.is_file():
        return own
    on_path = shutil.which("ninja")
    return None if on_path is None else Path(on_path)


def find_cuda_home() -> Path | None:
    """The directory of the CUDA toolkit: the first one where SGLang looks, else the one that pip installed."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return Path(named)
    if (nvcc := shutil.which("nvcc")) is not None:
        return Path(nvcc).parent.parent
    from_pip = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu[0-9]*"))
    for home in (Path("/usr/local/cuda"), *from_pip):
        if (home / "bin" / "nvcc").is_file():
            return home
    return None


def toolkit_environment(cache_dir: Path | None = None) -> dict[str, str]:
    """Environment variables by which a server finds ninja and the toolkit, and its linker the toolkit's libraries.

    cache_dir: directory for links to libraries; None: ~/.cache/scalerl.
    """
    env = {}
    if (ninja := find_ninja()) is not None:
        env["PATH"] = os.pathsep.join((str(ninja.parent), os.environ.get("PATH", os.defpath)))
    home = find_cuda_home()
    if home is None:
        return env
    env["CUDA_HOME"] = str(home)
    if not (home / "lib64" / "libcudart.so").exists() and (runtime := _runtime_library(home)) is not None:
        links = _link(runtime, cache_dir or _default_cache())
        library_path = os.environ.get("LIBRARY_PATH")
        env["LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(links), library_path)))
    return env


def _runtime_library(home: Path) -> Path | None:
    """The CUDA runtime of pip's wheels, which is in lib (not lib64) under a name that no linker looks for."""
    return next(iter(sorted((home / "lib").glob("libcudart.so.*"))), None)


def _link(library: Path, cache_dir: Path) -> Path:
    """A directory in which the library has the name that a linker looks for."""
    directory = cache_dir / "cuda-libraries" / hashlib.sha256(str(library).encode()).hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    # Another process of the node may have made the link.
    with contextlib.suppress(FileExistsError):
        (directory / "libcudart.so").symlink_to(library)
    return directory


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scalerl"
