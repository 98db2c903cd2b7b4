"""What the tests of this folder submit, and how they look after it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.jobs import Inputs
from tests.slurm.minislurm import POLL_S, MiniSlurm

REPO = Path(__file__).resolve().parents[2]
LAUNCHER = REPO / "launchers/slurm/ray.sbatch"
DRIVER = str(REPO / "tests/slurm/driver.py")
Launch = Callable[..., subprocess.CompletedProcess[str]]
# The command of a job that is to come back: it waits in the first attempt and is done in the second.
WAIT_ONCE = ("bash", "-c", f'[[ $SCALERL_ATTEMPT_DIR == */attempt_0 ]] || exit 0; exec python "{DRIVER}" wait')
# What ray_node.sh is to do in the steps of a job, on its first node and on each other.
STEPS_OF_HEAD = ["clean", "head", "preflight", "python", "python", "run"]
STEPS_OF_WORKER = ["clean", "preflight", "worker"]
# Of a training.
STEPS = 2
ENDLESS = "trainer.total_training_steps=100000"


def hosts_text(num_nodes: int) -> str:
    """The names of the nodes of a job, when no other job runs."""
    return " ".join(f"n{i}" for i in range(1, num_nodes + 1))


def steps_by_host(num_nodes: int) -> dict[str, list[str]]:
    """What ray_node.sh is to do on each node of a job."""
    head, *others = hosts_text(num_nodes).split()
    return {head: STEPS_OF_HEAD} | dict.fromkeys(others, STEPS_OF_WORKER)


def wait_until(
    what: str, condition: Callable[[], object], timeout_s: float = 180, *, shown: Path | None = None
) -> None:
    """shown: a file whose text a failure shows."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(
                f"{what}: not after {timeout_s} s\n{shown.read_text() if shown and shown.exists() else ''}"
            )
        time.sleep(POLL_S)


def wait_for_driver(slurm: MiniSlurm, job_id: str, out: Path) -> None:
    """Until the job's driver holds a Ray task."""

    def waiting() -> bool:
        text = out.read_text() if out.exists() else ""
        if slurm.job(job_id)["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING"):
            pytest.fail(f"job {job_id} ended before its driver waited:\n{text}")
        return "WAITING" in text

    wait_until("driver waits", waiting, 300, shown=out)


def kill_raylet(slurm: MiniSlurm, host: str) -> None:
    raylet = next(pid for pid, args in slurm.processes(host) if "raylet/raylet" in args.split()[0])
    slurm.run("kill", "-KILL", str(raylet), host=host)


def assert_nothing_left(slurm: MiniSlurm, timeout_s: float = 15) -> None:
    left: dict[str, list[tuple[int, str]]] = {}

    def clean() -> bool:
        left.update({host: slurm.processes(host) for host in slurm.hosts})
        return not any(left.values())

    try:
        wait_until("no process left", clean, timeout_s)
    except AssertionError:
        pytest.fail(f"left on the nodes: {left}")
    sessions = [path for host in slurm.hosts for path in (slurm.root / f"nodes/{host}/ray").glob("session_2*")]
    files = [str(path) for session in sessions for path in sorted(session.rglob("*"))[:20]]
    for path in sessions:  # no later test is to find them too
        shutil.rmtree(path)
    assert not sessions, f"left of jobs that are over: {sessions}, with {files}"


def assert_came_back(
    slurm: MiniSlurm,
    job_id: str,
    out: Path,
    *,
    because: str,
    logs: Path | None = None,
    timeout_s: float = 300,
    alone: bool = True,
) -> None:
    """The second attempt is the last, and did what was left.

    logs: of all jobs; beside `out` by default.  alone: no other job runs, so that nothing may be left on the nodes.
    """
    wait_until("second attempt", lambda: slurm.job(job_id)["Restarts"] == "1", timeout_s)
    job = slurm.wait(job_id, timeout_s)
    text = out.read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), text
    assert f"exit code {because}: requeue" in text
    assert {path.name for path in ((logs or out.parent / "logs") / job_id).glob("attempt_*")} == {
        "attempt_0",
        "attempt_1",
    }
    if alone:
        assert_nothing_left(slurm)


def limit_to_this_minute(slurm: MiniSlurm, job_id: str) -> None:
    """A job that runs ends with its minute, or the next where that is nearly over: limits are whole minutes."""
    hours, minutes, seconds = map(int, slurm.job(job_id)["RunTime"].split(":"))
    limit = 60 * hours + minutes + (1 if seconds < 10 else 2)
    slurm.run("scontrol", "update", f"JobId={job_id}", f"TimeLimit={limit}")


def with_time_again(slurm: MiniSlurm, job_id: str) -> None:
    """The second attempt is not to come to the first one's limit before its Ray is up."""
    wait_until("second attempt", lambda: slurm.job(job_id)["Restarts"] == "1", 300)
    slurm.run("scontrol", "update", f"JobId={job_id}", "TimeLimit=30")


@contextmanager
def slow_scontrol(directory: Path) -> Iterator[None]:
    """As of a busy controller: what is submitted meanwhile, and the test itself, wait for its answers."""
    directory.mkdir()
    program = directory / "scontrol"
    program.write_text(f'#!/bin/sh\nsleep 0.6\nexec {shutil.which("scontrol")} "$@"\n')
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
        yield


@contextmanager
def little_shared_memory(slurm: MiniSlurm, host: str) -> Iterator[None]:
    """So that the node is sick."""
    slurm.run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm", host=host)
    try:
        yield
    finally:
        slurm.run("umount", "/dev/shm", host=host)


@contextmanager
def hidden(slurm: MiniSlurm, host: str, directory: Path) -> Iterator[None]:
    """As a file system that is not mounted there."""
    slurm.run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory), host=host)
    try:
        yield
    finally:
        slurm.run("umount", str(directory), host=host)


@contextmanager
def second_network(slurm: MiniSlurm, nodes: Sequence[str]) -> Iterator[None]:
    """ib0 of each node, with an address that the nodes' names do not resolve to."""
    try:
        for host in nodes:
            slurm.run("ip", "link", "add", "ib0", "link", "eth0", "type", "macvlan", "mode", "bridge", host=host)
            slurm.run("ip", "link", "set", "ib0", "up", host=host)
            slurm.run("ip", "addr", "add", f"10.98.0.{host[1:]}/24", "dev", "ib0", host=host)
        yield
    finally:
        for host in nodes:
            slurm.run("ip", "link", "del", "ib0", host=host, check=False)


def overrides(small: Inputs, run_dir: Path, nnodes: int, n_gpus_per_node: int, *more: str) -> list[str]:
    return small.overrides(
        run_dir,
        "data.max_prompt_length=64",
        "actor_rollout_ref.actor.max_tokens_per_micro_batch=160",
        # One on each device.
        "actor_rollout_ref.rollout.num_replicas=null",
        f"trainer.nnodes={nnodes}",
        f"trainer.n_gpus_per_node={n_gpus_per_node}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
        *more,
    )


def launch_on(slurm: MiniSlurm, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`scalerl launch ARGUMENTS` on the login node."""
    command = [sys.executable, "-m", "scalerl.cli", "launch", *arguments]
    return slurm.run(*command, cwd=cwd, check=False, timeout_s=200)


def launched_job(done: subprocess.CompletedProcess[str]) -> str:
    """Its number."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split("job     ")[1].split(":")[0]
