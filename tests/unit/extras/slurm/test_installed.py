"""A wheel has the launcher's scripts, so that `scalerl launch` needs no repository."""

from __future__ import annotations

import tomllib
from pathlib import Path

from scalerl.extras.slurm.script import SCRIPTS

REPO = Path(__file__).parents[4]


def test_the_scripts_are_package_data() -> None:
    settings = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = settings["package-data"]["scalerl.extras.slurm"]
    packed = {path for pattern in patterns for path in SCRIPTS.parent.glob(pattern) if path.is_file()}
    assert {path.name for path in packed} == {"ray.sbatch", "ray_node.sh"}
    assert (REPO / "launchers/slurm").resolve() == SCRIPTS
