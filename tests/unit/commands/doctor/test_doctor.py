from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalerl.base.nvidia import NvidiaDevice
from scalerl.cluster.probes import gpu, host
from scalerl.cluster.probes.gpu import Devices
from scalerl.commands.doctor import command as doctor
from scalerl.commands.doctor.command import describe_devices, describe_platform, main, run_doctor
from scalerl.commands.doctor.packages import REQUIRED, Package, check_import

GOOD = Package("pytest", "pytest", "json", "nothing")
ABSENT = Package("no-such-package", "no_such_package", "no_such_package", "the sky falls")
BROKEN = Package("pytest", "pytest", "no_such_kernel", "slower", needed=False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `find_devices` finds on a machine without one, without the import of torch."""
    monkeypatch.setattr(doctor, "find_devices", lambda: Devices("2.13.0+cpu", None, ()))


@pytest.mark.usefixtures("no_gpu")
def test_reports_what_is_installed_and_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    optional = Package("no-such-package", "no_such_package", "no_such_package", "the sky falls", needed=False)
    assert run_doctor(required=[GOOD], optional=[optional]) == 0
    out = capsys.readouterr().out
    assert f"{'pytest':<20} {pytest.__version__:<14} installed" in out
    assert "missing; without it: the sky falls" in out
    assert "the main job can run here (as far as versions tell: scalerl doctor --imports imports every package)" in out


@pytest.mark.usefixtures("no_gpu")
def test_failing_import_ends_with_1_and_names_itself_and_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor(required=[ABSENT, GOOD], optional=[], import_all=True) == 1
    out = capsys.readouterr().out
    assert "no-such-package: - FAILS: ModuleNotFoundError: No module named 'no_such_package'" in out
    # One failure does not hide what follows it.
    assert f"{'pytest':<20} {pytest.__version__:<14} ok" in out
    assert "the main job can run here" not in out


@pytest.mark.usefixtures("no_gpu")
def test_what_is_not_installed_ends_with_1_without_an_import(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor(required=[ABSENT], optional=[]) == 1
    assert "no-such-package: missing\n      without it: the sky falls" in capsys.readouterr().out


@pytest.mark.usefixtures("no_gpu")
def test_installed_but_broken_optional_is_not_called_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor(required=[], optional=[BROKEN], import_all=True) == 0
    assert "FAILS: ModuleNotFoundError: No module named 'no_such_kernel'; without it: slower" in capsys.readouterr().out


def test_gpus_are_named_with_their_memory() -> None:
    lines = describe_devices([("NVIDIA H100 80GB HBM3", 80 << 30)])
    assert lines[0] == "0: NVIDIA H100 80GB HBM3, 80 GiB"
    assert describe_devices([])[0] == "no GPU"


@pytest.mark.full
@pytest.mark.parametrize("package", REQUIRED, ids=lambda package: package.name)
def test_required_package_imports_as_a_run_does(package: Package) -> None:
    assert check_import(package).ok


@pytest.mark.usefixtures("no_gpu")
def test_little_space_is_a_warning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(host, "MIN_FREE_DISK_GIB", 1e9)
    run_doctor(required=[], optional=[])
    assert "less than 1e+09 GiB" in capsys.readouterr().out


def test_command_reports_a_broken_torch(tmp_path: Path) -> None:
    """The whole command, with a torch that cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "scalerl.commands.doctor.command"], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == 1
    assert "torch: FAILS: ImportError: libcudart.so.13: cannot open shared object file" in done.stdout
    assert "CPU platform\n  unknown: torch does not import" in done.stdout
    assert done.stderr == ""


def test_a_gpu_that_torch_does_not_see_is_a_warning() -> None:
    device = NvidiaDevice("535.104.05", ("/dev/nvidia0",))
    description = describe_platform(Devices("2.13.0", "13.0", ()), device)
    assert description.startswith("WARNING") and all(
        part in description for part in ("535.104.05", "CUDA 13.0", "/dev/nvidia0")
    )
    assert describe_platform(Devices("2.13.0+cpu", None, ()), None).startswith("on: no GPU")
    assert describe_platform(Devices("2.13.0", "13.0", (("H200", 1),)), device) == "off: CUDA 13.0 is used"


def test_gpu_on_a_machine_without_one_says_what_was_not_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu.nvidia, "find_nvidia_device", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["--gpu"]) == 1
    out = capsys.readouterr().out
    for name in ("driver and CUDA", "SGLang kernel", "NCCL collective", "memory handed over"):
        line = next(line for line in out.splitlines() if line.strip().startswith(name))
        assert "FAILS" in line and "no" in line
    for name in ("locked memory", "C++ compiler", "ninja", "nvcc", "Transformer Engine", "links between GPUs"):
        assert f"\n  {name}" in out
