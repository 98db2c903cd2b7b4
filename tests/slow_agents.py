"""Agents of Ray's that start slowly, as where many nodes read Python's packages from one file system."""

from __future__ import annotations

from pathlib import Path

# Each Python process imports it at its start.
_SITECUSTOMIZE = """
import pathlib, time
line = pathlib.Path("/proc/self/cmdline").read_text()
if "/ray/dashboard/agent.py" in line or "/ray/_private/runtime_env/agent/main.py" in line:
    with pathlib.Path(__file__).with_name("slow.txt").open("a") as file:
        file.write("an agent\\n")
    time.sleep(40)
"""


def make_agents_slow(directory: Path) -> None:
    """Makes the two of each node take 40 s where directory, which is made, is in PYTHONPATH.

    By itself Ray's raylet waits 15 s for one of them and 30 s for the other.
    """
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(_SITECUSTOMIZE)


def number_of_slow_agents(directory: Path) -> int:
    """How many have been started."""
    return len((directory / "slow.txt").read_text().splitlines())
