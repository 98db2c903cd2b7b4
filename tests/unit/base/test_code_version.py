"""The version that a checkpoint keeps is that of the code that runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import scalerl
from scalerl.base import code_version


@pytest.fixture(autouse=True)
def fresh() -> None:
    code_version.code_version.cache_clear()


def test_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "scalerl"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(scalerl, "__file__", str(package / "__init__.py"))
    assert code_version.code_version() == {"version": scalerl.__version__}

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    for changed in ("", "+changes"):
        code_version.code_version.cache_clear()
        version = code_version.code_version()
        assert version == {"version": scalerl.__version__, "commit": git("rev-parse", "HEAD") + changed}
        (package / "__init__.py").write_text("# changed")


def test_a_repository_that_git_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(scalerl, "__file__", str(tmp_path / "scalerl" / "__init__.py"))
    assert code_version.code_version() == {"version": scalerl.__version__}
