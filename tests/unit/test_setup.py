"""`make setup` asks for the CPU build of torch by its name: an index without it costs a message, not gigabytes.

Packages are installed by uv where it can do what pip is configured to do.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

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
    for name in ("cpu.txt", "cpu-nodeps.txt", "megatron.txt", "cpu-torchvision.txt"):
        (tmp_path / "requirements" / name).touch()
    for name in ("Makefile", "requirements/install.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
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
    installed = sorted(path.name for path in (project / target).glob("torch-*.dist-info"))
    return done.returncode, done.stderr, installed


def test_a_cuda_build_is_not_installed_unasked(project: Path) -> None:
    wheel(project, CUDA)
    code, error, installed = make_torch(project, "unasked")
    assert (code, installed) == (2, [])
    assert "make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu" in error
    assert "make setup TORCH=torch==2.13.0" in error
    # Asked for, it is; and the CPU build where there are both.
    assert make_torch(project, "asked", "TORCH=torch==2.13.0")[::2] == (0, [f"{CUDA}.dist-info"])
    wheel(project, CPU)
    assert make_torch(project, "both")[::2] == (0, [f"{CPU}.dist-info"])


@pytest.fixture
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "requirements" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_uv_gets_the_configuration_of_pip(install: ModuleType) -> None:
    config = """\
:env:.disable-pip-version-check='1'
:env:.index-url='https://user:word@index.example/simple'
global.cert='/etc/ca.pem'
global.extra-index-url='https://a.example/simple\\nhttps://b.example/simple'
global.index-url='https://not-this.example/simple'
install.find-links='/wheels /more'
global.constraint='/etc/pip/constraints.txt'
freeze.timeout='5'
"""
    assert install.uv_settings(config) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "https://user:word@index.example/simple",
        "UV_INDEX": "https://a.example/simple https://b.example/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_CONSTRAINT": "/etc/pip/constraints.txt",
        "SSL_CERT_FILE": "/etc/ca.pem",
    }
    # What it cannot be told is left to pip.
    assert install.uv_settings(config + "global.only-binary=':all:'\n") is None
