"""Probes of a machine's space, limits, compilers and hardware."""

from __future__ import annotations

import resource
import stat
from pathlib import Path

import pytest

from scalerl.cluster.probes import host
from scalerl.cluster.probes.host import bad_rows, check_infiniband, xid_lines


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


def test_memory_errors_and_xids_are_read() -> None:
    assert bad_rows("0, 0, No, No\n1, [N/A], [N/A], [N/A]\n") == []
    assert bad_rows("0, 0, 0, 0\n7, 2, No, Yes\n") == ["GPU 7: 2, No, Yes (uncorrected, remapping failed, pending)"]
    log = "[1.0] eth0 up\n[2.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
    assert xid_lines(log) == ["[2.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."]
    # What a program did, or what its end left.
    of_programs = [f"[3.0] NVRM: Xid (PCI:0000:3b:00): {number}, pid=1, name=python" for number in (13, 31, 43, 45)]
    assert xid_lines("\n".join(of_programs)) == []


def test_infiniband_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_infiniband(tmp_path).ok and "not here" in check_infiniband(tmp_path).value
    for adapter, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        (tmp_path / adapter / "ports/1").mkdir(parents=True)
        (tmp_path / adapter / "ports/1/state").write_text(f"{state}\n")
    assert check_infiniband(tmp_path).ok and check_infiniband(tmp_path, "mlx5_0").ok
    down = check_infiniband(tmp_path, "mlx5_0,mlx5_1")
    assert not down.ok and down.value == "mlx5_0:1 ACTIVE, mlx5_1:1 DOWN"
    assert check_infiniband(tmp_path, "^mlx5_1").ok and check_infiniband(tmp_path, "=mlx5_0:1").ok
    # The beginning of both names, of which one has no cable.
    assert not check_infiniband(tmp_path, "^mlx5_0").ok and check_infiniband(tmp_path, "mlx5").ok
    assert not check_infiniband(tmp_path, "^=mlx5_0").ok and not check_infiniband(tmp_path, "mlx5_0,mlx5_1:1").ok
    assert "leaves NCCL none" in check_infiniband(tmp_path, "=mlx5").meaning
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    unused = check_infiniband(tmp_path, "mlx5_1")
    assert unused.ok and "not used (NCCL_IB_DISABLE)" in unused.value


def test_a_machine_without_nvidia_has_nothing_to_complain_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    probes = (host.check_memory_errors, host.check_driver_errors, host.check_nvlinks)
    assert all(probe().ok and "not here" in probe().value for probe in probes)
    assert host.check_device_count(8).ok


@pytest.mark.parametrize(
    ("status", "counted"),
    [
        (None, None),
        ("", (0, 0)),
        ("GPU 0: NVIDIA H100 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n", (1, 1)),
    ],
)
def test_links_are_counted(
    status: str | None, counted: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "nvidia_smi", lambda *arguments: status)
    assert host.count_nvlinks() == counted
