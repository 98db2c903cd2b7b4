"""Finds ninja and a CUDA toolkit, with which a server compiles kernels at its start, also where pip installed them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path


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
