from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.jobs import Inputs
from tests.slurm.jobs import LAUNCHER, Launch, launch_on, wait_until
from tests.slurm.minislurm import MiniSlurm, why_not
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniSlurm]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    slurm = MiniSlurm(tmp_path_factory.mktemp("slurm") / "root")
    slurm.start()
    try:
        yield slurm
    finally:
        slurm.stop()


@pytest.fixture
def slurm(cluster: MiniSlurm) -> Iterator[MiniSlurm]:
    """The cluster, without a job before and after the test."""

    def wait_until_no_job() -> None:
        # Also of those that are ending, whose nodes the next job would not get.
        wait_until("no job left", lambda: not cluster.run("squeue", "--noheader").stdout)

    wait_until_no_job()
    yield cluster
    cluster.run("scancel", "--user=root", check=False)
    wait_until_no_job()


@pytest.fixture
def submit(slurm: MiniSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setenv("SCALERL_VENV", sys.prefix)
    monkeypatch.setenv("SCALERL_RAY_ARGS", "--object-store-memory=80000000")
    monkeypatch.setenv("SCALERL_CPUS_PER_NODE", "2")

    def run(num_nodes: int, *command: str, options: tuple[str, ...] = (), cwd: Path = tmp_path) -> str:
        return slurm.sbatch(f"-N{num_nodes}", "--output=out-%j.txt", *options, str(LAUNCHER), *command, cwd=cwd)

    return run


@pytest.fixture
def launch(slurm: MiniSlurm, submit: object, tmp_path: Path) -> Launch:
    """`scalerl launch ...` on the login node. submit: for the variables that it sets."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return launch_on(slurm, tmp_path, *arguments)

    return run


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    directory = tmp_path_factory.mktemp("small")
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{number}+1="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"split": "train", "index": number},
        }
        for number in range(8)
    ]
    prompts = directory / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist(rows), prompts)
    return Inputs(make_tiny_model(directory / "model", "qwen3", num_layers=2), prompts, prompts)
