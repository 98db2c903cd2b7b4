from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalerl import doctor
from scalerl.doctor import (
    OPTIONAL,
    REQUIRED,
    Package,
    describe_devices,
    describe_platform,
    probe,
    run_doctor,
    run_python,
)
from scalerl.nvidia import NvidiaDevice

GOOD = Package("pytest", "import json", "nothing")
ABSENT = Package("no-such-package", "import no_such_package", "the sky falls")


def test_reports_what_imports_and_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor(required=[GOOD], optional=[ABSENT]) == 0
    out = capsys.readouterr().out
    assert f"{'pytest':<20} {pytest.__version__:<14} ok" in out
    assert "missing; without it: the sky falls" in out
    assert "the main job can run here" in out


def test_failing_import_ends_with_1_and_names_itself_and_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor(required=[ABSENT, GOOD], optional=[]) == 1
    out = capsys.readouterr().out
    assert "no-such-package: ModuleNotFoundError: No module named 'no_such_package'" in out
    # One failure does not hide what follows it.
    assert f"{'pytest':<20} {pytest.__version__:<14} ok" in out
    assert "the main job can run here" not in out


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11: no message"),
        ("raise OSError('libfoo.so: undefined symbol')", "OSError: libfoo.so: undefined symbol"),
        ("raise SystemExit(3)", "no message"),
    ],
)
def test_crash_of_an_import_is_an_error_here(code: str, error: str) -> None:
    assert run_python(code) == ("", error)


def test_import_that_hangs_is_an_error() -> None:
    _, error = run_python("import time; time.sleep(60)", timeout_s=0.5)
    assert error == "import takes more than 0.5 s"


def test_installed_but_broken_optional_is_not_called_missing(capsys: pytest.CaptureFixture[str]) -> None:
    broken = Package("pytest", "import no_such_kernel", "slower")
    assert run_doctor(required=[], optional=[broken]) == 0
    assert "FAILS: ModuleNotFoundError: No module named 'no_such_kernel'; without it: slower" in capsys.readouterr().out


def test_gpus_are_named_with_their_memory() -> None:
    lines = describe_devices([("NVIDIA H100 80GB HBM3", 80 << 30)])
    assert lines[0] == "0: NVIDIA H100 80GB HBM3, 80 GiB"
    assert describe_devices([])[0] == "no GPU"


def test_lists_cover_what_users_ask_for() -> None:
    assert {"torch", "megatron-core", "sglang", "ray", "mlflow", "hydra-core", "transformers"} <= {
        package.name for package in REQUIRED
    }
    assert {"transformer-engine", "apex", "flash-attn", "torch_memory_saver", "sglang-kernel"} == {
        package.name for package in OPTIONAL
    }


@pytest.mark.full
def test_sglang_imports_as_its_server_does() -> None:
    sglang = next(package for package in REQUIRED if package.name == "sglang")
    assert probe(sglang).error is None


def test_little_space_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_FREE_DISK_GIB", 1e9)
    assert "WARNING: less than 1e+09 GiB" in doctor.describe_space()[0]


def test_command_reports_a_broken_torch(tmp_path: Path) -> None:
    """The whole command, with a torch that cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = (
        "import sys, scalerl.doctor as d; "
        "sys.exit(d.run_doctor([p for p in d.REQUIRED if p.name in ('torch', 'numpy')], []))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 1
    assert "torch: ImportError: libcudart.so.13: cannot open shared object file" in done.stdout
    assert "CPU platform\n  unknown: torch does not import" in done.stdout
    assert done.stderr == ""


def test_a_gpu_that_torch_does_not_see_is_a_warning() -> None:
    device = NvidiaDevice("535.104.05", ("/dev/nvidia0",))
    found = describe_platform([], "13.0", device)
    assert found.startswith("WARNING") and all(part in found for part in ("535.104.05", "CUDA 13.0", "/dev/nvidia0"))
    assert describe_platform([], None, None).startswith("on: no GPU")
    assert describe_platform([["H200", 1]], "13.0", device) == "off: CUDA 13.0 is used"
