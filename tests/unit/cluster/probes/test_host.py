from __future__ import annotations

import resource
import stat
from pathlib import Path

import pytest

from scalerl.cluster.probes import host


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with no program."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_compiler_compiles_a_program_with_python_headers() -> None:
    assert host.check_compiler().ok


def test_compiler_that_fails_and_none_say_what_to_install(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = host.check_compiler()
    assert not none.ok and "apt-get install g++ python3-dev" in none.meaning
    text = "echo 'probe.cpp:1:10: fatal error: Python.h: No such file or directory' >&2; exit 1"
    monkeypatch.setenv("CXX", str(write_program(empty_path / "c++", text)))
    broken = host.check_compiler()
    assert not broken.ok and "Python.h: No such file" in broken.value


def test_missing_ninja_and_nvcc_say_what_to_install(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "find_cuda_home", lambda: None)
    monkeypatch.setattr(host, "find_ninja", lambda: None)
    assert "pip install ninja" in host.check_ninja().meaning
    assert "requirements/gpu.txt" in host.check_nvcc("13.0").meaning
    monkeypatch.setattr(host, "find_ninja", lambda: empty_path / "ninja")
    assert host.check_ninja().value == str(empty_path / "ninja")


def test_nvcc_of_another_major_version_than_torch_is_refused(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(empty_path / "cuda"))
    write_program(empty_path / "cuda" / "bin" / "nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.131'")
    assert host.check_nvcc("12.8").ok
    finding = host.check_nvcc("13.0")
    assert not finding.ok and "torch is built for CUDA 13.0" in finding.meaning and finding.value.startswith("12.4")


def test_low_limit_of_locked_memory_matters_beside_infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_MEMLOCK: (64 << 20, 64 << 20)}
    monkeypatch.setattr(host.resource, "getrlimit", limits.__getitem__)
    assert host.check_locked_memory(tmp_path).ok
    (tmp_path / "mlx5_0").mkdir()
    finding = host.check_locked_memory(tmp_path)
    assert not finding.ok and finding.value == "64 MiB" and "ulimit -l unlimited" in finding.meaning
    limits[resource.RLIMIT_MEMLOCK] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert host.check_locked_memory(tmp_path).ok


def test_little_shared_memory_and_none_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.check_shared_memory(tmp_path / "none").ends_a_run
    assert "--shm-size" in host.check_shared_memory(tmp_path, min_gib=1e9).meaning
    assert "clean up" in host.check_disk(tmp_path, min_gib=1e9).meaning and host.check_disk(tmp_path, min_gib=0).ok


def test_few_open_files_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.check_open_files().ok
    monkeypatch.setattr(host.resource, "getrlimit", lambda limit: (1024, 1024))
    finding = host.check_open_files()
    assert not finding.ok and finding.value == "1024" and "LimitNOFILE" in finding.meaning
