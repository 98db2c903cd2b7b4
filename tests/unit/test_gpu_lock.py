"""requirements/gpu.txt is whole: it fits scalerl, the packages that are installed here, and its own header.

`python requirements/lock.py --check` resolves it again, for which it needs a package index.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def load_lock() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock", ROOT / "requirements" / "lock.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LOCK = load_lock()
TEXT = LOCK.LOCK.read_text(encoding="utf-8")
PINS = LOCK.pins(TEXT)
MACHINE = {"sys_platform": "linux", "platform_machine": "x86_64", "platform_system": "Linux", "extra": ""}


def unmet(requirements: list[str]) -> list[str]:
    """Those that the lock has no version of, or another one."""
    unsatisfied = []
    for requirement in map(Requirement, requirements):
        name = LOCK.name_of(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate(MACHINE)
        if not applies or name in LOCK.LEFT_OUT:
            continue
        if name not in PINS or not requirement.specifier.contains(PINS[name], prereleases=True):
            unsatisfied.append(f"{requirement} (locked: {PINS.get(name)})")
    return unsatisfied


def test_lock_has_what_is_asked_for() -> None:
    assert unmet(LOCK.asked()) == []


@pytest.mark.parametrize("package", ["sglang", "megatron-core", "transformers", "ray", "mlflow", "math-verify"])
def test_lock_has_what_a_package_declares(package: str) -> None:
    """By the metadata of the installed version, which must be the locked one: of another one this would say nothing."""
    installed = importlib.metadata.version(package)
    assert installed == PINS[package], "make requirements/gpu.txt anew (python requirements/lock.py)"
    assert unmet(importlib.metadata.requires(package) or []) == []


def test_what_a_server_compiles_with_is_locked_at_torchs_cuda() -> None:
    assert {
        "ninja",
        "flashinfer-python",
        "sglang-kernel",
        "torch-memory-saver",
        "nvidia-cutlass-dsl-libs-cu13",
    } <= PINS.keys()
    compilers = [PINS[name] for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime")]
    assert {version.rsplit(".", 1)[0] for version in compilers} == {"13.0"}


def test_other_versions_than_on_a_cpu_are_said_in_the_file() -> None:
    assert LOCK.lock_text(PINS, LOCK.cpu_pins()) == TEXT
    said = {line.partition("==")[0] for line in TEXT.splitlines() if "# cpu.txt:" in line}
    assert said == {name for name, version in LOCK.cpu_pins().items() if PINS.get(name, version) != version}


@pytest.mark.full
def test_resolving_again_changes_nothing() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "requirements" / "lock.py", "--check"], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
