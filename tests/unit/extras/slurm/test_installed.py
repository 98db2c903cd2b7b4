"""A wheel has the launcher's scripts, so that `scalerl launch` needs no repository."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

from scalerl.extras.slurm.script import SCRIPTS

REPO = Path(__file__).parents[4]


def test_the_scripts_find_the_repository_and_the_module_of_a_servers_watcher() -> None:
    (folder,) = re.findall(r"^REPOSITORY=\$\((.*)\)$", (SCRIPTS / "ray.sbatch").read_text(), re.MULTILINE)
    found = subprocess.run(
        ["bash", "-c", f"HELPERS={REPO / 'launchers/slurm'}; {folder}"], capture_output=True, text=True
    )
    assert Path(found.stdout.strip()) == REPO.resolve()
    (pattern,) = re.findall(r"'(scalerl\[\.\].*?)'", (SCRIPTS / "ray_node.sh").read_text())
    assert importlib.util.find_spec(pattern.replace("[.]", ".")) is not None
