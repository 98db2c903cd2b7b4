from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.minislurm import MiniSlurm, why_not


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
    """The cluster, with all nodes idle before and after the test."""
    yield cluster
    cluster.run("scancel", "--user=root", check=False)
