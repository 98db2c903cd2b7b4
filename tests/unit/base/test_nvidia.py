"""An NVIDIA device as the file system shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalerl.base.nvidia import VISIBLE_DEVICES, are_hidden, count_devices, find_nvidia_device, hide
from scalerl.cluster.device import device_of

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs@U16)\n"
CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  gcc 12\n"
)


def write(root: Path, name: str, text: str = "") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_no_device(tmp_path: Path) -> None:
    # The control device is there without one.
    for name in ("dev/nvidiactl", "dev/null", "dev/nvidia-uvm", "usr/bin/python3"):
        write(tmp_path, name)
    assert find_nvidia_device(tmp_path) is None


def tool(root: Path, name: str, says: str, code: int = 0) -> Path:
    """A program that says what nvidia-smi --list-gpus says."""
    path = write(root, name, f"#!/bin/sh\n[ \"$1\" = --list-gpus ] || exit 9\nprintf '%s\\n' '{says}'\nexit {code}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", ["dev/nvidia0", "usr/bin/nvidia-smi", "usr/lib/wsl/lib/nvidia-smi"])
def test_one_sign_is_enough(tmp_path: Path, name: str) -> None:
    path = tool(tmp_path, name, "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)")
    device = find_nvidia_device(tmp_path)
    assert device is not None and device.signs == (str(path),) and device.driver is None


@pytest.mark.parametrize(
    ("says", "code"),
    [("No devices were found", 6), ("NVIDIA-SMI has failed", 9), ("", 0)],
    ids=["none", "fails", "mute"],
)
@pytest.mark.parametrize("with_driver", [False, True])
def test_a_login_node_has_the_tool_and_no_device(tmp_path: Path, says: str, code: int, with_driver: bool) -> None:
    tool(tmp_path, "usr/bin/nvidia-smi", says, code)
    if with_driver:
        write(tmp_path, "proc/driver/nvidia/version", OPEN)
        (tmp_path / "proc/driver/nvidia/gpus").mkdir()
    assert find_nvidia_device(tmp_path) is None
    assert device_of("auto", torch_sees_one=False, torch_build="torch", hidden=False, root=tmp_path) == "cpu"


def test_a_tool_that_cannot_run_is_no_device(tmp_path: Path) -> None:
    write(tmp_path, "usr/bin/nvidia-smi")
    assert find_nvidia_device(tmp_path) is None


def test_a_driver_with_a_device_that_is_kept_from_this_process(tmp_path: Path) -> None:
    """As in a container without access to the GPUs: a run on the CPU there would be a mistake."""
    path = write(tmp_path, "proc/driver/nvidia/version", OPEN)
    write(tmp_path, "proc/driver/nvidia/gpus/0000:3b:00.0/information")
    device = find_nvidia_device(tmp_path)
    assert device is not None and device.signs == (str(path),)


@pytest.mark.parametrize(("text", "driver"), [(OPEN, "570.124.06"), (CLOSED, "535.104.05"), ("something else\n", None)])
def test_the_driver(tmp_path: Path, text: str, driver: str | None) -> None:
    path = write(tmp_path, "proc/driver/nvidia/version", text)
    write(tmp_path, "dev/nvidia10")
    device = find_nvidia_device(tmp_path)
    assert device is not None and device.driver == driver
    assert device.signs == (str(tmp_path / "dev/nvidia10"), str(path))


def test_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    assert not are_hidden()
    for value, expected in (("0", False), ("-1", True), ("", True)):
        monkeypatch.setenv(VISIBLE_DEVICES, value)
        assert are_hidden() is expected
    monkeypatch.setenv(VISIBLE_DEVICES, "0,1")
    hide()
    assert are_hidden()


def test_devices_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    assert count_devices(tmp_path) == 0
    tool(tmp_path, "usr/bin/nvidia-smi", "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)")
    # Its absence was not remembered.
    assert count_devices(tmp_path) == 1
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        write(tmp_path, f"dev/{name}")
    assert count_devices(tmp_path) == 3
    for visible, number in (("0,1", 2), ("GPU-5f", 1), ("", 0), ("-1", 0)):
        monkeypatch.setenv(VISIBLE_DEVICES, visible)
        assert count_devices(tmp_path) == number
