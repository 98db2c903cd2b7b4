"""launchers/slurm/ray.sbatch against a real Slurm of four nodes with a real Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slow_agents import make_agents_slow, number_of_slow_agents
from tests.slurm.jobs import (
    DRIVER,
    REPO,
    WAIT_ONCE,
    assert_came_back,
    assert_nothing_left,
    hosts_text,
    kill_raylet,
    second_network,
    steps_by_host,
    wait_for_driver,
    wait_until,
)
from tests.slurm.minislurm import MiniSlurm


@pytest.mark.full
def test_four_nodes_with_their_devices(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first of them another process has the port that Ray's head would take, on the second one of a node."""
    # As a Slurm with MPI sets them for each process of a step.
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    holder, other = slurm.occupy(6379, "n1"), slurm.occupy(6402, "n2")
    try:
        job_id = submit(4, "python", DRIVER, "report", "4", "8", "0", options=("--gpus-per-node=8",))
        job = slurm.wait(job_id)
    finally:
        slurm.run("kill", holder, host="n1")
        slurm.run("kill", other, host="n2")
    out = (tmp_path / f"out-{job_id}.txt").read_text()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), out
    assert re.search(rf'port 6379 of n1 is taken by "python[^"]*",pid={holder},', out), out
    assert "head n1 (10.99.0.11:6380)" in out
    report = json.loads(next(line for line in out.splitlines() if line.startswith("REPORT")).removeprefix("REPORT"))
    assert report["nodes"] == {f"n{i}": f"10.99.0.{10 + i}" for i in range(1, 5)}
    assert sorted(task["host"] for task in report["tasks"]) == slurm.hosts
    assert [task["devices"] for task in report["tasks"]] == [[str(i) for i in range(8)]] * 4
    assert [task["leaked"] for task in report["tasks"]] == [[]] * 4
    assert [(task["not_used"], task["niceness"]) for task in report["tasks"]] == [([], os.nice(0))] * 4
    assert report["driver_leaked"] == []
    assert report["cpus"] == 8
    assert report["order"] == slurm.hosts

    attempt = tmp_path / f"logs/{job_id}/attempt_0"
    assert sorted(path.name for path in attempt.iterdir()) == [
        "driver.log", *(f"node-n{i}.log" for i in range(1, 5)), "preflight",
    ]  # fmt: skip
    assert "REPORT" in (attempt / "driver.log").read_text()
    ports = (attempt / "node-n2.log").read_text()
    assert re.search(rf'port 6402 is taken by "python[^"]*",pid={other},', ports), ports
    assert "object-manager-port=6401 runtime-env-agent-port=6403 " in ports
    # Below those that the kernel gives to connections.
    assert "min-worker-port=10002 max-worker-port=19999" in ports
    probed = json.loads((attempt / "preflight/report.json").read_text())
    assert [node["host"] for node in probed] == slurm.hosts
    assert all(probe["ok"] for node in probed for probe in node["probes"])
    assert os.readlink(tmp_path / f"logs/{job_id}/latest") == "attempt_0"
    assert os.readlink(tmp_path / "logs/latest") == f"{job_id}/latest"
    assert_nothing_left(slurm)


@pytest.mark.full
def test_exit_code_passes_and_paths_may_have_spaces(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    secrets = folder / "secrets"
    secrets.touch(mode=0o600)
    secrets.write_text("# of the tracking server\nOF_NOBODY_ELSE=a b=$c\nNCCL_NET_GDR_LEVEL=SYS\n")
    monkeypatch.setenv("SCALERL_ENV_FILE", str(secrets))
    (folder / "repo").symlink_to(REPO)
    launcher = folder / "repo/launchers/slurm/ray.sbatch"
    # --gres is the other way to ask for devices; one argument has a space.
    job_id = slurm.sbatch(
        "-N2", "--output=out.txt", "--gres=gpu:3", str(launcher), "bash", "-c",
        'echo "ARGS $# [$1] [$OF_NOBODY_ELSE]"; exec python "$2" report "$3" 3 5', "-", "two words", DRIVER,
        "2", cwd=folder,
    )  # fmt: skip
    job = slurm.wait(job_id)
    out = (folder / "out.txt").read_text()
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "5:0"), out
    assert "ARGS 3 [two words] [a b=$c]" in out
    assert out.count('"devices": ["0", "1", "2"]') == 2
    # The file's variables reach all nodes.
    assert out.count('"gdr_level": "SYS"') == 2
    attempt = folder / f"logs/{job_id}/latest"
    assert all((attempt / f"node-{host}.log").exists() for host in hosts_text(2).split())
    assert list((attempt / "ray/n1").glob("gcs_server*")), "a failed attempt keeps Ray's own logs"
    assert_nothing_left(slurm)


# On two nodes, with a real run: tests/slurm/test_two_node_run.py.
@pytest.mark.full
def test_usr1_reaches_the_command_and_requeues(slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path) -> None:
    job_id = submit(3, *WAIT_ONCE)
    out = tmp_path / f"out-{job_id}.txt"
    wait_for_driver(slurm, job_id, out)
    slurm.run("scancel", "--signal=USR1", "--batch", job_id)
    assert_came_back(slurm, job_id, out, because="75")
    assert f"SAVED SIGUSR1 {hosts_text(3)}\n" in out.read_text()


@pytest.mark.full
def test_a_repeated_notice_may_end_a_command_that_is_ending(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path
) -> None:
    job_id = submit(2, *WAIT_ONCE[:2], f"{WAIT_ONCE[2]} slowly")
    out = tmp_path / f"out-{job_id}.txt"
    wait_for_driver(slurm, job_id, out)
    slurm.run("scancel", "--signal=USR1", "--batch", job_id)
    assert_came_back(slurm, job_id, out, because="75")
    assert "command ended with code 138" in out.read_text()


@pytest.mark.full
@pytest.mark.parametrize(("num_nodes", "wanted"), [(2, "10.98."), (1, "ib0")])
def test_the_network_is_chosen_by_its_addresses_or_its_name(
    slurm: MiniSlurm,
    submit: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_nodes: int,
    wanted: str,
) -> None:
    """What the user sets for NCCL reaches the workers, and the logs of their nodes."""
    monkeypatch.setenv("SCALERL_INTERFACE", wanted)
    monkeypatch.setenv("NCCL_NET_GDR_LEVEL", "PHB")
    hosts = hosts_text(num_nodes).split()
    with second_network(slurm, hosts):
        job_id = submit(num_nodes, "python", DRIVER, "report", str(num_nodes), "0", "0")
        slurm.wait(job_id)
    out = (tmp_path / f"out-{job_id}.txt").read_text()
    assert "REPORT" in out, out
    report = json.loads(next(line for line in out.splitlines() if line.startswith("REPORT")).removeprefix("REPORT"))
    assert report["nodes"] == {host: f"10.98.0.{host[1:]}" for host in hosts}
    assert [task["network"] for task in report["tasks"]] == ["ib0"] * num_nodes
    assert [task["gdr_level"] for task in report["tasks"]] == ["PHB"] * num_nodes
    for host in hosts:
        told = (tmp_path / f"logs/{job_id}/attempt_0/node-{host}.log").read_text()
        assert "GLOO_SOCKET_IFNAME=ib0\nNCCL_NET_GDR_LEVEL=PHB\nNCCL_SOCKET_IFNAME=ib0\n" in told


@pytest.mark.full
def test_a_network_that_is_not_there_is_named_with_those_that_are(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALERL_INTERFACE", "ib9")
    job_id = submit(2, "true")
    job = slurm.wait(job_id)
    out = (tmp_path / f"out-{job_id}.txt").read_text()
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "70:0"), out
    assert "no IPv4 address for SCALERL_INTERFACE=ib9; there are: " in out and "eth0 10.99.0.11/24" in out


@pytest.mark.full
def test_a_node_without_the_network_is_left_out(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Ray starts, which on that node could not."""
    monkeypatch.setenv("SCALERL_INTERFACE", "ib0")
    monkeypatch.setenv("SCALERL_NUM_NODES", "2")
    with second_network(slurm, ("n1", "n3")):
        job_id = submit(3, "true")
        job = slurm.wait(job_id)
    out = (tmp_path / f"out-{job_id}.txt").read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0"), out
    assert "sick: n2: reports: its probe ended: ray_node.sh on n2: no IPv4 address for SCALERL_INTERFACE=ib0; " in out
    assert "] nodes: n1 n3\n" in out
    assert_nothing_left(slurm)


@pytest.mark.full
def test_preemption_leaves_ray_whole_and_requeues(slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path) -> None:
    """Slurm sends TERM to the command and to Ray on every node at once."""
    job_id = submit(3, *WAIT_ONCE, options=("--partition=low",))
    out = tmp_path / f"out-{job_id}.txt"
    wait_for_driver(slurm, job_id, out)
    slurm.sbatch("-N4", "--exclusive", "--partition=main", "--output=/dev/null", "--wrap=true", cwd=tmp_path)
    assert_came_back(slurm, job_id, out, because="75")
    assert f"SAVED SIGTERM {hosts_text(3)}\n" in out.read_text()


@pytest.mark.full
@pytest.mark.parametrize("num_nodes", [3, 1])
def test_scancel_lets_the_command_save_and_ends_the_job_for_good(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, num_nodes: int
) -> None:
    job_id = submit(num_nodes, *WAIT_ONCE)
    out = tmp_path / f"out-{job_id}.txt"
    wait_for_driver(slurm, job_id, out)
    slurm.run("scancel", job_id)
    assert_saved_and_ended_for_good(slurm, job_id, out, hosts_text(num_nodes), restarts=0)


def assert_saved_and_ended_for_good(slurm: MiniSlurm, job_id: str, out: Path, hosts: str, *, restarts: int) -> None:
    job = slurm.wait(job_id)
    wait_until("the launcher's last word", lambda: "not started again" in out.read_text(), shown=out)
    assert out.read_text().rpartition("SAVED ")[2].startswith(f"SIGTERM {hosts}\n")
    assert "not started again, Slurm is ending the job" in out.read_text()
    assert_nothing_left(slurm)
    assert (slurm.job(job_id)["JobState"], job["Restarts"]) == ("CANCELLED", str(restarts))


@pytest.mark.full
@pytest.mark.parametrize(("num_nodes", "moment"), [(1, "] nodes: "), (2, "] head is up\n")])
def test_a_job_that_is_cancelled_while_a_node_is_launched_leaves_nothing(
    slurm: MiniSlurm,
    submit: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_nodes: int,
    moment: str,
) -> None:
    """The head, or the other node. Nobody gets what the launcher tells a step that is only just beginning.

    Ray's files are in the user's TMPDIR, a short path: of its sockets none may be long.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        for delay_s in (0.0, 0.3, 0.4, 0.5):
            job_id = submit(num_nodes, *WAIT_ONCE)
            out = tmp_path / f"out-{job_id}.txt"
            wait_until("the nodes", lambda out=out: out.exists() and moment in out.read_text())
            time.sleep(delay_s)
            slurm.run("scancel", job_id)
            wait_until("the launcher's last word", lambda out=out: "not started again" in out.read_text(), shown=out)
            slurm.wait(job_id)
            assert_nothing_left(slurm)
            assert not list(Path(directory).glob("ray/session_2*")), f"{delay_s} s"


@pytest.mark.full
def test_a_job_is_preempted_loses_a_node_and_is_cancelled(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path
) -> None:
    """It comes back after each but the last."""
    job_id = submit(2, "python", DRIVER, "wait", options=("--partition=low",))
    out = tmp_path / f"out-{job_id}.txt"

    def waiting_in_attempt(number: int) -> None:
        wait_until(f"attempt {number}", lambda: out.read_text().count("WAITING") == number + 1, 400, shown=out)

    wait_for_driver(slurm, job_id, out)
    slurm.sbatch("-N4", "--exclusive", "--partition=main", "--output=/dev/null", "--wrap=true", cwd=tmp_path)
    waiting_in_attempt(1)
    assert "exit code 75: requeue" in out.read_text()
    assert f"SAVED SIGTERM {hosts_text(2)}\n" in out.read_text()
    assert slurm.job(job_id)["Restarts"] == "1"
    (other,) = (host for host in slurm.nodes_of(job_id) if host != slurm.job(job_id)["BatchHost"])
    slurm.power_off(other)
    try:
        waiting_in_attempt(2)
    finally:
        slurm.power_on(other)
    left = slurm.nodes_of(job_id)
    assert other not in left
    slurm.run("scancel", job_id)
    assert_saved_and_ended_for_good(slurm, job_id, out, " ".join(left), restarts=2)


@pytest.mark.full
@pytest.mark.parametrize(("num_nodes", "host"), [(3, "n3"), (1, "n1")])
def test_a_killed_raylet_is_named_and_requeues(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, num_nodes: int, host: str
) -> None:
    job_id = submit(num_nodes, *WAIT_ONCE)
    out = tmp_path / f"out-{job_id}.txt"
    wait_for_driver(slurm, job_id, out)
    kill_raylet(slurm, host)
    assert_came_back(slurm, job_id, out, because="70")
    assert f"error: Ray is no longer up on all nodes; first to end: Ray on {host}, code 1\n" in out.read_text()
    assert list((tmp_path / f"logs/{job_id}/attempt_0/ray/{host}").iterdir())


@pytest.fixture
def waiting_with_a_spare_node(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path]:
    """A job on three nodes, all in its Ray cluster, whose command needs two, and the job's output."""
    monkeypatch.setenv("SCALERL_NUM_NODES", "2")
    job_id = submit(3, *WAIT_ONCE, options=("--no-kill",))
    out = tmp_path / f"out-{job_id}.txt"
    wait_for_driver(slurm, job_id, out)
    return job_id, out


@pytest.mark.full
def test_as_many_nodes_may_be_lost_as_there_are_spare_ones(
    slurm: MiniSlurm, waiting_with_a_spare_node: tuple[str, Path], tmp_path: Path
) -> None:
    job_id, out = waiting_with_a_spare_node
    kill_raylet(slurm, "n3")
    lost = "] lost: Ray on n3, which ended with code 1. 2 nodes are left, the command needs 2\n"
    wait_until("the loss", lambda: lost in out.read_text(), shown=out)
    kill_raylet(slurm, "n2")
    assert_came_back(slurm, job_id, out, because="70")
    assert "error: Ray is no longer up on all nodes; first to end: Ray on n2, code 1\n" in out.read_text()
    assert sorted(path.name for path in (tmp_path / f"logs/{job_id}/attempt_0/ray").iterdir()) == ["n1", "n2", "n3"]


@pytest.mark.full
def test_the_node_of_the_batch_script_is_lost_in_a_job_that_outlives_lost_nodes(
    slurm: MiniSlurm, waiting_with_a_spare_node: tuple[str, Path], tmp_path: Path
) -> None:
    """Slurm would leave the job as it is, on its other nodes, until its time limit."""
    job_id, out = waiting_with_a_spare_node
    assert slurm.job(job_id)["BatchHost"] == "n1"
    slurm.power_off("n1")
    try:
        wait_until("second attempt", lambda: slurm.job(job_id)["Restarts"] == "1", 300, shown=out)
        job = slurm.wait(job_id)
    finally:
        slurm.power_on("n1")
    assert (job["JobState"], job["NodeList"], job["Restarts"]) == ("COMPLETED", "n[2-4]", "1"), out.read_text()
    said = [path.read_text() for path in (tmp_path / f"logs/{job_id}/attempt_0").glob("guard-n*.log")]
    assert f"n1, where the launcher was, is no longer in job {job_id}: requeue\n" in "".join(said)
    assert_nothing_left(slurm)


@pytest.mark.full
def test_a_lost_node_requeues(slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path) -> None:
    job_id = submit(3, *WAIT_ONCE)
    out = tmp_path / f"out-{job_id}.txt"
    wait_for_driver(slurm, job_id, out)
    slurm.power_off("n3")
    try:
        wait_until("second attempt", lambda: slurm.job(job_id)["Restarts"] == "1", 300)
        job = slurm.wait(job_id)
    finally:
        slurm.power_on("n3")
    assert (job["JobState"], job["NodeList"], job["Restarts"]) == ("COMPLETED", "n[1-2,4]", "1"), out.read_text()
    # Whatever the command made of it.
    assert ": Slurm starts it again itself\n" in out.read_text() and "not started again" not in out.read_text()
    assert_nothing_left(slurm)


@pytest.mark.full
def test_a_killed_command_is_not_run_again(slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path) -> None:
    job_id = submit(1, "python", DRIVER, "wait")
    out = tmp_path / f"out-{job_id}.txt"
    wait_for_driver(slurm, job_id, out)
    driver = next(pid for pid, args in slurm.processes("n1") if args == f"python {DRIVER} wait")
    slurm.run("kill", "-KILL", str(driver), host="n1")
    job = slurm.wait(job_id)
    assert (job["ExitCode"], job["Restarts"]) == (f"{128 + signal.SIGKILL}:0", "0"), out.read_text()
    assert "not started again, code 137 is the command's own" in out.read_text()
    assert_nothing_left(slurm)


@pytest.mark.full
def test_restarts_have_an_end(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of attempts that fail soon, and of all; a mistake of the user's is not tried again at all."""
    monkeypatch.setenv("SCALERL_MAX_FAILURES", "2")
    monkeypatch.setenv("SCALERL_MAX_RESTARTS", "1")
    ends = {
        "70": "2 attempts in a row brought no newer checkpoint: they failed within 1800s, or came to the job's end "
        "(SCALERL_MAX_FAILURES)",
        "75": "restarts without a newer checkpoint: 1 of at most 1 (SCALERL_MAX_RESTARTS)",
        "2": "code 2 is the command's own",
    }
    jobs = {code: submit(1, "bash", "-c", f"exit {code}") for code in ends}
    for code, reason in ends.items():
        job, out = slurm.wait(jobs[code]), (tmp_path / f"out-{jobs[code]}.txt").read_text()
        assert (job["ExitCode"], job["Restarts"]) == (f"{code}:0", "0" if code == "2" else "1"), out
        assert f"exit code {code}: not started again, {reason}\n" in out
    assert_nothing_left(slurm)


def test_readiness_names_missing_hosts_and_devices(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of what ends with 70 the job would make a second attempt.
    monkeypatch.setenv("SCALERL_MAX_FAILURES", "1")
    command = (
        'exec python -m scalerl.cluster.wait_for_ray --address "$RAY_ADDRESS" --hosts n1,n9 --gpus 8 --timeout-s 1'
    )
    job_id = submit(1, "bash", "-c", command, options=("--gpus-per-node=2",))
    job = slurm.wait(job_id)
    out = (tmp_path / f"out-{job_id}.txt").read_text()
    assert job["ExitCode"] == "70:0", out
    assert "n9: not in the cluster" in out
    assert "n1: 2 of 8 GPUs" in out


@pytest.mark.full
def test_rays_agents_may_be_slow(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_agents_slow(tmp_path / "slow")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "slow"), prepend=os.pathsep)
    job_id = submit(2, "python", DRIVER, "report", "2", "0", "0")
    job = slurm.wait(job_id)
    out = (tmp_path / f"out-{job_id}.txt").read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0"), out
    assert number_of_slow_agents(tmp_path / "slow") == 4
    assert_nothing_left(slurm)


@pytest.mark.full
def test_node_that_cannot_start_ends_the_job_with_its_log(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALERL_RAY_ARGS", "--no-such-option")
    job_id = submit(2, "true")
    job = slurm.wait(job_id)
    out = (tmp_path / f"out-{job_id}.txt").read_text()
    assert job["ExitCode"] == "70:0", out
    assert "No such option" in out
    assert_nothing_left(slurm)


@pytest.mark.full
def test_every_step_is_in_the_container(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An apptainer that says with what it was called, and runs it outside of any container."""
    stand_in = tmp_path / "bin/apptainer"
    stand_in.parent.mkdir()
    says = f'echo "$@" >>"{tmp_path}/calls.$(hostname)"'
    skips = "while [[ $1 != */a.sif ]]; do shift; done"
    stand_in.write_text(f'#!/bin/bash\n{says}\n{skips}\nexec "${{@:2}}"\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SCALERL_CONTAINER", "apptainer")
    monkeypatch.setenv("SCALERL_IMAGE", "/images/a.sif")
    monkeypatch.setenv("SCALERL_MOUNTS", "/data,/fast:/cache")
    job_id = submit(2, "python", DRIVER, "report", "2", "0", "0")
    job = slurm.wait(job_id)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), (tmp_path / f"out-{job_id}.txt").read_text()
    start = f"exec --nv --bind /data,/fast:/cache --pwd {tmp_path} /images/a.sif bash "
    modes = {}
    for host in hosts_text(2).split():
        calls = (tmp_path / f"calls.{host}").read_text().splitlines()
        assert all(call.startswith(start) for call in calls)
        modes[host] = sorted(call.split("ray_node.sh ")[1].split()[0] for call in calls)
    assert modes == steps_by_host(2)
    assert_nothing_left(slurm)


def test_usage_errors_hold_no_ray(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_command = submit(1)
    of_two_kinds = submit(1, "true", options=(":", "-N1"))
    monkeypatch.setenv("SCALERL_VENV", str(tmp_path / "nothing here"))
    no_venv = submit(1, "true")
    monkeypatch.setenv("SCALERL_CONTAINER", "pyxis")
    no_pyxis = submit(1, "true")
    for job_id, message in (
        (no_command, "no command given"),
        (of_two_kinds, "heterogeneous jobs are not supported: ask for one kind of node"),
        (no_venv, "nothing here/bin/ray: run 'make setup'"),
        (no_pyxis, "srun has no --container-image here"),
    ):
        job = slurm.wait(job_id)
        out = (tmp_path / f"out-{job_id}.txt").read_text()
        assert (job["ExitCode"], job["Restarts"]) == ("64:0", "0"), out
        assert message in out
        assert not (tmp_path / "logs").exists()
