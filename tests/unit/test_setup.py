"""`make setup` asks for the CPU build of torch by its name: an index without it costs a message, not gigabytes."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU, CUDA = "torch-2.13.0+cpu", "torch-2.13.0"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are no CUDA builds")


def wheel(directory: Path, name: str) -> None:
    version = name.removeprefix("torch-")
    with zipfile.ZipFile(directory / f"{name}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        file.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{name}.dist-info/RECORD", "")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The Makefile in a directory of its own, with this Python and requirements that are none."""
    (tmp_path / "requirements").mkdir()
    for name in ("cpu.txt", "cpu-nodeps.txt"):
        (tmp_path / "requirements" / name).touch()
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\nversion = '0'\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return tmp_path


def make_torch(project: Path, target: str, *variables: str) -> tuple[int, str, list[str]]:
    """`make torch` of an index that is a directory: exit code, standard error, and what was installed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(project)}
    environment |= {"PIP_TARGET": str(project / target)}
    done = subprocess.run(
        ["make", "torch", *variables], cwd=project, env=environment, capture_output=True, text=True, timeout=120
    )
    found = sorted(path.name for path in (project / target).glob("torch-*.dist-info"))
    return done.returncode, done.stderr, found


def test_a_cuda_build_is_not_installed_unasked(project: Path) -> None:
    wheel(project, CUDA)
    code, error, found = make_torch(project, "unasked")
    assert (code, found) == (2, [])
    assert "make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu" in error
    assert "make setup TORCH=torch==2.13.0" in error
    # Asked for, it is; and the CPU build where there are both.
    assert make_torch(project, "asked", "TORCH=torch==2.13.0")[::2] == (0, [f"{CUDA}.dist-info"])
    wheel(project, CPU)
    assert make_torch(project, "both")[::2] == (0, [f"{CPU}.dist-info"])
