"""A node that does not see what the run names says so before Ray starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from scalerl.launch.plan import repository


@pytest.mark.parametrize("is_there", [False, True])
def test_a_path_that_the_node_cannot_read(tmp_path: Path, is_there: bool) -> None:
    seen, missing, needs = tmp_path / "seen", tmp_path / "two words", tmp_path / "needs.txt"
    seen.touch()
    if is_there:
        missing.touch()
    needs.write_text(f"{seen}\n{missing}\n")
    # What comes next fails in any case: there is no cluster to join.
    environment = os.environ | {
        "SCALERL_NEEDS": str(needs),
        "SLURMD_NODENAME": "n7",
        "SCALERL_RAY_ADDRESS": "127.0.0.1:1",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
    }
    script = repository() / "launchers/slurm/ray_node.sh"
    done = subprocess.run(["bash", str(script), "worker"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 70
    assert (f"{missing} is not readable on n7" in done.stderr) != is_there
    assert str(seen) not in done.stderr
