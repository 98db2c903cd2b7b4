"""A server finds ninja, the CUDA toolkit and its libraries, those that pip installed too."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from scalerl.base import cuda_toolkit


def write_program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with no program on its path, whose Python environment is tmp_path."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(cuda_toolkit.sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(cuda_toolkit.sysconfig, "get_path", lambda name: str(tmp_path / "site-packages"))
    for name in ("CUDA_HOME", "CUDA_PATH", "LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_ninja_of_the_environment_is_found_off_the_path(machine: Path) -> None:
    assert cuda_toolkit.find_ninja() is None
    ninja = write_program(machine / "bin" / "ninja")
    assert cuda_toolkit.find_ninja() == ninja
    assert cuda_toolkit.toolkit_environment(machine)["PATH"].split(os.pathsep)[0] == str(machine / "bin")


def test_toolkits_are_looked_for_in_the_order_of_sglang(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = write_program(machine / "path" / "bin" / "nvcc")
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert cuda_toolkit.find_cuda_home() == machine / "path"
    monkeypatch.setenv("CUDA_PATH", "/opt/cuda-13.0")
    assert cuda_toolkit.find_cuda_home() == Path("/opt/cuda-13.0")
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda-13.1")
    assert cuda_toolkit.find_cuda_home() == Path("/opt/cuda-13.1")


def test_linker_finds_the_runtime_of_pips_toolkit(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's wheels have lib/libcudart.so.13 alone; SGLang links by -L$CUDA_HOME/lib64 -lcudart."""
    compiler = shutil.which("c++", path=os.defpath)
    assert compiler is not None
    home = machine / "site-packages" / "nvidia" / "cu13"
    write_program(home / "bin" / "nvcc")
    (home / "lib").mkdir()
    source = machine / "runtime.cpp"
    source.write_text('extern "C" int cudaRuntimeGetVersion() { return 13000; }\n')
    library = home / "lib" / "libcudart.so.13"
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True, env={"PATH": os.defpath})
    monkeypatch.setenv("CUDA_HOME", str(home))
    program = machine / "main.cpp"
    program.write_text('extern "C" int cudaRuntimeGetVersion(); int main() { cudaRuntimeGetVersion(); }\n')
    link = [compiler, program, f"-L{home}/lib64", "-lcudart", "-o", machine / "main"]
    assert subprocess.run(link, capture_output=True, env={"PATH": os.defpath}).returncode != 0
    env = cuda_toolkit.toolkit_environment(machine / "cache") | {"PATH": os.defpath}
    # A second process of the node.
    assert cuda_toolkit.toolkit_environment(machine / "cache")["LIBRARY_PATH"] == env["LIBRARY_PATH"]
    assert subprocess.run(link, capture_output=True, env=env).returncode == 0


def test_whole_toolkit_needs_no_link(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = machine / "cuda"
    (home / "lib64").mkdir(parents=True)
    (home / "lib64" / "libcudart.so").touch()
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert cuda_toolkit.toolkit_environment(machine) == {"CUDA_HOME": str(home)}
