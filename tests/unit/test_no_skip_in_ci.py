"""In CI what a machine lacks is a failure: tests/conftest.py turns every skip into one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPS = """
import pytest

def test_that_runs(): pass

def test_that_lacks_something(): pytest.skip("no sandbox")

@pytest.mark.skipif(True, reason="not installed")
def test_of_a_package(): pass

@pytest.mark.xfail
def test_known(): assert False

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="no GPU")
def test_on_a_gpu(): pass
"""


@pytest.mark.parametrize(
    ("ci", "ends"),
    [("true", "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error"), ("", "1 passed, 3 skipped, 1 xfailed")],
)
def test_a_skip_fails_in_ci(tmp_path: Path, ci: str, ends: str) -> None:
    (tmp_path / "test_skips.py").write_text(SKIPS)
    done = run(tmp_path / "test_skips.py", ci)
    assert f"{ends} in" in done.stdout, done.stdout
    assert (done.returncode == 1) == bool(ci)
    assert all(reason in done.stdout for reason in ("no sandbox", "not installed"))


def test_a_module_that_skips_fails_in_ci(tmp_path: Path) -> None:
    (tmp_path / "test_skips.py").write_text("import pytest\npytest.importorskip('surely_not_installed')\n")
    done = run(tmp_path / "test_skips.py", "true")
    assert "surely_not_installed" in done.stdout
    assert done.returncode not in (0, 5)


def run(path: Path, ci: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(path)]
    environment = os.environ | {"CI": ci, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
