"""The example's data and untrained model, and a starter of runs that leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from scalerl.cluster.processes import Processes
from tests.e2e.jobs import Inputs, Job
from tests.e2e.kept import Kept

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic"

StartJob = Callable[[Sequence[str], Path], Job]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    directory = tmp_path_factory.mktemp("inputs")
    for script, out in (("make_data.py", directory), ("make_model.py", directory / "model")):
        command = [sys.executable, "-W", "ignore", str(EXAMPLE / script), "--out", str(out)]
        subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return Inputs(directory / "model", directory / "rl_train.parquet", directory / "rl_val.parquet")


@pytest.fixture(scope="session")
def kept(processes: Processes) -> Kept:
    return Kept(processes)


@pytest.fixture(scope="session")
def start_job() -> Iterator[StartJob]:
    started: list[Job] = []

    def start(arguments: Sequence[str], directory: Path) -> Job:
        directory.mkdir(parents=True, exist_ok=True)
        started.append(Job(arguments, directory))
        return started[-1]

    yield start
    for job in started:
        job.kill_all()
