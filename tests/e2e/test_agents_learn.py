"""The examples of agents learn what they are about."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import EXAMPLE, StartJob
from tests.e2e.jobs import Job

AGENTS = EXAMPLE.parent / "agents"
TIMEOUT_S = 1800


def curve(job: Job, what: str) -> list[float]:
    """The values that the example prints last."""
    line = re.search(rf"^{what}: ([\d. ]+)$", job.stdout, re.MULTILINE)
    assert line, job.tail()
    return [float(value) for value in line[1].split()]


def finished(start_job: StartJob, directory: Path, example: str) -> Job:
    job = start_job([sys.executable, str(AGENTS / example), "--out", str(directory / "out")], directory)
    assert job.finish(TIMEOUT_S) == 0, job.tail()
    return job


@pytest.mark.full
def test_a_model_learns_to_use_a_tool(start_job: StartJob, tmp_path: Path) -> None:
    """Without the tool the same model with the same training does not learn the task."""
    job = finished(start_job, tmp_path, "tool_use.py")
    score, calls = curve(job, "score with the tool"), curve(job, "calls per sample with the tool")
    assert score[0] < 0.45 and calls[0] < 0.5
    assert score[-1] > 0.8 and calls[-1] > 0.8
    assert max(curve(job, "score without the tool")) < 0.15


@pytest.mark.full
def test_agents_and_a_sub_agent_learn_a_game(start_job: StartJob, tmp_path: Path) -> None:
    won = curve(finished(start_job, tmp_path, "nim.py"), "games won against a perfect player")
    assert won[0] < 0.3 and won[-1] > 0.8
