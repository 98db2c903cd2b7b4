from __future__ import annotations

from pathlib import Path

import pytest

from scalerl.cluster.probes import hardware
from scalerl.cluster.probes.hardware import bad_rows, check_infiniband, xid_lines


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
    probes = (hardware.check_memory_errors, hardware.check_driver_errors, hardware.check_nvlinks)
    assert all(probe().ok and "not here" in probe().value for probe in probes)
    assert hardware.check_device_count(8).ok


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
    monkeypatch.setattr(hardware, "nvidia_smi", lambda *arguments: status)
    assert hardware.count_nvlinks() == counted
