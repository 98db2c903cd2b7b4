"""Shell is linted wherever it stands: scripts and Dockerfile by `make lint`, the Apptainer definition here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHELL = re.compile(rb"#!\s*\S*[/ ](ba|da|k)?sh\b")
# Sections of a definition that are no shell.
DATA = ("files", "labels", "help", "arguments")


def scripts() -> set[str]:
    """The files that begin as a shell script does."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = (ROOT / name for name in listed.stdout.split("\0") if name)
    return {str(file.relative_to(ROOT)) for file in files if file.is_file() and SHELL.match(first_line(file))}


def first_line(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.readline(200)


def linted(program: str) -> set[str]:
    """The files that `make lint` gives to a program."""
    out = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (command,) = (line for line in out.splitlines() if line.startswith(f".venv/bin/{program} "))
    return {str(path.relative_to(ROOT)) for pattern in command.split()[1:] for path in ROOT.glob(pattern)}


def test_make_lint_reads_every_script_and_the_dockerfile() -> None:
    assert {"docker/install.sh", "scalerl/extras/slurm/scripts/ray.sbatch", ".ci/run"} <= scripts()
    assert linted("shellcheck") == scripts()
    assert linted("hadolint") == {"docker/Dockerfile"}


def test_sections_of_the_apptainer_definition(tmp_path: Path) -> None:
    """As apptainer runs them: each by sh, in a file of its own."""
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("no shellcheck in this environment: make setup")
    definition = (ROOT / "docker" / "scalerl.def").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", definition, re.MULTILINE | re.DOTALL))
    files = []
    for name in sections.keys() - DATA:
        files.append(tmp_path / name)
        files[-1].write_text(f"#!/bin/sh\n{sections[name]}")
    assert {file.name for file in files} == {"post", "environment", "runscript"}
    done = subprocess.run([shellcheck, *files], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
