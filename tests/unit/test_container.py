"""The container's files name what is there; how far they were built is in docs/gpu.md."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
DEFINITION = (ROOT / "docker" / "scalerl.def").read_text(encoding="utf-8")
INSTALL = (ROOT / "docker" / "install.sh").read_text(encoding="utf-8")


def copied_by_docker() -> dict[str, str]:
    """What is copied -> its directory in the image."""
    copied, directory = {}, ""
    for line in DOCKERFILE.splitlines():
        if line.startswith("WORKDIR"):
            directory = line.split()[1]
        elif line.startswith("COPY"):
            *sources, _ = line.split()[1:]
            copied |= dict.fromkeys(sources, directory)
    return copied


def copied_by_apptainer() -> dict[str, str]:
    section = DEFINITION.partition("%files")[2].partition("\n%")[0]
    pairs = [line.split() for line in section.splitlines() if line.strip()]
    return {source: "/" + target.split("/")[1] for source, target in pairs}


def test_what_is_copied_is_there_and_the_same_in_both() -> None:
    assert copied_by_docker() == copied_by_apptainer()
    for source in copied_by_docker():
        assert (ROOT / source).exists(), source
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line in copied_by_docker()]
    assert ignored == []


def test_both_begin_with_the_same_image_of_the_lock_s_cuda() -> None:
    base = re.search(r"ARG BASE=(\S+)", DOCKERFILE)
    assert base is not None and f"From: {base[1]}\n" in DEFINITION
    cuda = re.search(r"^nvidia-cuda-runtime==(\d+\.\d+)", (ROOT / "requirements" / "gpu.txt").read_text(), re.M)
    assert cuda is not None and f"cuda:{cuda[1]}." in base[1]


def test_install_is_a_program_that_names_files_which_are_copied() -> None:
    subprocess.run(["bash", "-n", ROOT / "docker" / "install.sh"], check=True)
    assert (ROOT / "docker" / "install.sh").stat().st_mode & 0o111
    for name in re.findall(r"-[rc] (\S+)", INSTALL):
        assert (ROOT / name).exists() and name.split("/")[0] in copied_by_docker()
    # What setuptools reads.
    assert {"README.md", "LICENSE", "pyproject.toml", "scalerl"} <= copied_by_docker().keys()


def test_what_is_copied_builds_a_package_with_all_its_files(tmp_path: Path) -> None:
    """As install.sh builds it: by the locked setuptools, where nothing else of the repository is."""
    source = tmp_path / "src"
    for name in (name for name, directory in copied_by_docker().items() if directory == "/src"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(ROOT / name, source / name)
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    files = [path.relative_to(ROOT) for path in (ROOT / "scalerl").rglob("*") if path.is_file()]
    with zipfile.ZipFile(wheel) as packed:
        missing = {str(file) for file in files if "__pycache__" not in file.parts} - set(packed.namelist())
    assert missing == set()


def test_sections_of_the_apptainer_definition_are_linted(tmp_path: Path) -> None:
    """As apptainer runs them: each by sh, in a separate file. `make lint` reads the other scripts."""
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("no shellcheck in this environment: make setup")
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", DEFINITION, re.MULTILINE | re.DOTALL))
    files = [tmp_path / name for name in ("post", "environment", "runscript")]
    for file in files:
        file.write_text(f"#!/bin/sh\n{sections[file.name]}")
    done = subprocess.run([shellcheck, *files], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
