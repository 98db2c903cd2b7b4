"""Sites that are not like the first: containers by pyxis, no GRES, an account and a QOS that are required."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.jobs import Inputs, numbered, only
from tests.slurm.jobs import DRIVER, Launch, assert_nothing_left, launch_on, overrides, steps_by_host
from tests.slurm.minislurm import MiniSlurm

PLUGIN = Path(__file__).with_name("pyxis.c")
IN_CONTAINER = ["slurm.container=pyxis", "slurm.image='registry/team#scalerl:1'"]
# As on sites that charge every job to somebody.
ACCOUNT_REQUIRED = """
function slurm_job_submit(job, partitions, user)
  if job.account == nil or job.qos == nil then
    slurm.log_user("every job needs an account and a QOS")
    return slurm.ERROR
  end
  return slurm.SUCCESS
end
function slurm_job_modify(job, before, partitions, user) return slurm.SUCCESS end
"""


SWITCHES = """
SwitchName=left Nodes=n1,n3
SwitchName=right Nodes=n2
SwitchName=top Switches=left,right
"""


@pytest.fixture
def pyxis(slurm: MiniSlurm, tmp_path: Path) -> Iterator[Path]:
    """Slurm with a plugin that has the options of pyxis; the file in which it notes each task in a container."""
    built, noted = tmp_path / "pyxis.so", tmp_path / "noted"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(built), str(PLUGIN)], check=True)
    slurm.plugins.write_text(f"required {built} log={noted}\n")
    noted.touch()
    yield noted
    slurm.plugins.write_text("")


@pytest.mark.full
def test_every_step_is_in_the_container_of_pyxis_and_only_when_asked_for(
    slurm: MiniSlurm, submit: Callable[..., str], pyxis: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = submit(2, "true")
    assert slurm.wait(outside)["ExitCode"] == "0:0", (tmp_path / f"out-{outside}.txt").read_text()
    assert pyxis.read_text() == ""
    monkeypatch.setenv("SCALERL_CONTAINER", "pyxis")
    monkeypatch.setenv("SCALERL_IMAGE", "registry/team#scalerl:1")
    monkeypatch.setenv("SCALERL_MOUNTS", "/data,/fast:/cache")
    job_id = submit(2, "python", DRIVER, "report", "2", "0", "0")
    job = slurm.wait(job_id)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), (tmp_path / f"out-{job_id}.txt").read_text()
    steps: dict[str, list[str]] = {}
    for line in pyxis.read_text().splitlines():
        host, *options, command = line.split("\t")
        assert options == ["registry/team#scalerl:1", "/data:/data,/fast:/cache", str(tmp_path), f"scalerl_{job_id}"]
        steps.setdefault(host, []).append(command.split("ray_node.sh ")[1].split()[0])
    assert {host: sorted(modes) for host, modes in steps.items()} == steps_by_host(2)
    assert_nothing_left(slurm)


def test_a_launch_finds_the_plugin(launch: Launch, pyxis: Path, small: Inputs, tmp_path: Path) -> None:
    completed = launch("slurm", *overrides(small, tmp_path / "run", 2, 1), *IN_CONTAINER, "--dry-run")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "export SCALERL_CONTAINER=pyxis\n" in (tmp_path / "run/launch/job.sbatch").read_text()


def test_a_launch_misses_the_plugin(launch: Launch, small: Inputs, tmp_path: Path) -> None:
    missed = launch("slurm", *overrides(small, tmp_path / "run", 2, 1), *IN_CONTAINER, "--dry-run")
    assert missed.returncode == 2, missed.stdout + missed.stderr
    only(numbered(missed.stderr), "slurm.container = pyxis", "srun has no --container-image here")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def bare_cluster(cluster: MiniSlurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniSlurm]:
    """A site of its own: devices are not counted, an account and a QOS are required, and there are several switches."""
    slurm = MiniSlurm(
        tmp_path_factory.mktemp("bare") / "root",
        num_nodes=3,
        gpus=0,
        options=["JobSubmitPlugins=lua", "TopologyPlugin=topology/tree"],
        files={"job_submit.lua": ACCOUNT_REQUIRED, "topology.conf": SWITCHES},
    )
    slurm.start()
    try:
        yield slurm
    finally:
        slurm.stop()


CHARGED = ["slurm.account=us", "slurm.qos=long"]
NO_GRES = "slurm.gpu_option=none"


def test_a_site_that_requires_account_and_qos(
    bare_cluster: MiniSlurm, submit: object, small: Inputs, tmp_path: Path
) -> None:
    """submit: for the variables that it sets. It has no accounting (sacct) either, as no site of these tests."""
    arguments = ["slurm", *overrides(small, tmp_path / "run", 3, 1), NO_GRES, "--dry-run"]
    refused = launch_on(bare_cluster, tmp_path, *arguments)
    assert refused.returncode == 2 and "every job needs an account and a QOS" in refused.stderr, refused.stderr
    accepted = launch_on(bare_cluster, tmp_path, *arguments, *CHARGED)
    assert accepted.returncode == 0, accepted.stderr


@pytest.mark.full
def test_a_site_without_gres(
    bare_cluster: MiniSlurm, submit: object, small: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.setenv("HF_HOME", "/cache")
    monkeypatch.setenv("OF_NOBODY_ELSE", "secret")
    arguments = ["slurm", *overrides(small, run_dir, 3, 1), NO_GRES, *CHARGED, "slurm.export=[HF_*]", "--dry-run"]
    accepted = launch_on(bare_cluster, tmp_path, *arguments)
    assert accepted.returncode == 0, accepted.stderr

    # The job's file, with another command: what counts is which devices it finds.
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\n[ "$1" = --list-gpus ] || exit 1\nfor i in 0 1 2; do echo "GPU $i: H100"; done\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    script = run_dir / "launch/job.sbatch"
    head, _, _ = script.read_text().partition("exec bash")
    command = f'echo "GOT [$HF_HOME] [$OF_NOBODY_ELSE]"; exec python {DRIVER} report 3 3 0'
    script.write_text(f"{head}exec bash \"$SCALERL_LAUNCHER/ray.sbatch\" bash -c '{command}'\n")
    job_id = bare_cluster.sbatch(str(script), cwd=tmp_path)
    job = bare_cluster.wait(job_id)
    out = (run_dir / f"logs/slurm-{job_id}.out").read_text()
    assert (job["JobState"], job["ExitCode"], job["Account"]) == ("COMPLETED", "0:0", "us"), out
    assert "GOT [/cache] []\n" in out
    report = json.loads(next(line for line in out.splitlines() if line.startswith("REPORT")).removeprefix("REPORT"))
    assert sorted(report["nodes"]) == bare_cluster.hosts
    assert report["order"] == ["n1", "n3", "n2"], "nodes of a switch are neighbours"
    assert [task["devices"] for task in report["tasks"]] == [["0", "1", "2"]] * 3
    assert_nothing_left(bare_cluster)
