"""What a job makes of its attempts: at its time limit, of those that bring nothing, of what one has for itself."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.jobs import (
    LAUNCHER,
    WAIT_ONCE,
    assert_came_back,
    assert_nothing_left,
    kill_raylet,
    limit_to_this_minute,
    wait_for_driver,
    wait_until,
    with_time_again,
)
from tests.slurm.minislurm import MiniSlurm

# It saves nothing, whatever it is told, and is done in the second attempt.
ONCE = "[[ $SCALERL_ATTEMPT_DIR == */attempt_0 ]] || exit 0; echo SLEEPING; "
SLEEPS_ONCE = ("bash", "-c", ONCE + "exec sleep 3600")
# And Ray's step does not end before it is killed.
STAYS_ONCE = ("bash", "-c", ONCE + "pkill -STOP -f '^[^ ]*bash [^ ]*/ray_node.sh head'; exec sleep 3600")
# As scalerl does: with each attempt a newer checkpoint, for so many attempts.
PROGRESS = """
echo "$2" >"$SCALERL_ATTEMPT_DIR/.run_dir"
tracker=$2/latest_checkpointed_iteration.txt step=$(cat "$2/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
((step >= $1)) || echo $((step + 1)) >"$tracker"
exit 75
"""
LOCK = """
import sys, time
from pathlib import Path
from scalerl.base.directory_lock import directory_lock
with directory_lock(Path(sys.argv[1]), "trainer.default_local_dir = run", grace_s=2):
    print("HELD", flush=True)
    time.sleep(600)
"""


@pytest.mark.full
@pytest.mark.parametrize(("num_nodes", "command"), [(2, SLEEPS_ONCE), (1, STAYS_ONCE)])
def test_a_command_that_has_not_saved_when_the_job_ends_is_ended_and_requeued(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, num_nodes: int, command: tuple[str, ...]
) -> None:
    """The notice and the limit are Slurm's own; the command ignores the notice."""
    job_id = submit(num_nodes, *command, options=("--time=30", "--signal=B:USR1@40"))
    out = tmp_path / f"out-{job_id}.txt"
    wait_until("the command", lambda: out.exists() and "SLEEPING" in out.read_text(), 300, shown=out)
    limit_to_this_minute(slurm, job_id)
    with_time_again(slurm, job_id)
    assert_came_back(slurm, job_id, out, because="75", timeout_s=300)
    text = out.read_text()
    assert "got USR1" in text and "got TERM" not in text and "TIME LIMIT" not in text
    assert "the command was told to save and has not; the job ends in " in text
    if command is STAYS_ONCE:
        assert "some steps did not end within " in text and "srun: error: n1: task 0: Killed" in text
    assert "Its work since its beginning is lost: give it more time (slurm.notice_s" in text


@pytest.mark.full
def test_a_job_that_its_time_limit_ends_is_requeued(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path
) -> None:
    """Without a notice: the script of a site may have another --signal. 28 is WINCH, which ends nobody."""
    job_id = submit(2, *SLEEPS_ONCE, options=("--time=30", "--signal=B:28@10"))
    out = tmp_path / f"out-{job_id}.txt"
    wait_until("the command", lambda: out.exists() and "SLEEPING" in out.read_text(), 300, shown=out)
    limit_to_this_minute(slurm, job_id)
    with_time_again(slurm, job_id)
    assert_came_back(slurm, job_id, out, because="143", timeout_s=300)
    assert "got TERM" in out.read_text() and "DUE TO TIME LIMIT" in out.read_text()


@pytest.mark.full
def test_only_attempts_that_bring_nothing_are_counted(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALERL_MAX_RESTARTS", "1")
    run_dir = tmp_path / "my run"
    run_dir.mkdir()
    job_id = submit(2, "bash", "-c", PROGRESS, "-", "3", str(run_dir))
    job = slurm.wait(job_id, timeout_s=500)
    out = (tmp_path / f"out-{job_id}.txt").read_text()
    # Three with a newer checkpoint each, then two without.
    assert (job["ExitCode"], job["Restarts"]) == ("75:0", "4"), out
    assert "not started again, restarts without a newer checkpoint: 1 of at most 1 (SCALERL_MAX_RESTARTS)\n" in out
    assert (tmp_path / f"logs/{job_id}/.newest").read_text() == f"{run_dir}/global_step_3\n"
    assert_nothing_left(slurm)


def test_two_jobs_do_not_write_into_one_directory(slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path) -> None:
    command = (sys.executable, "-c", LOCK, str(tmp_path / "run"))
    first = submit(1, *command)
    out = tmp_path / f"out-{first}.txt"
    wait_until("the lock", lambda: out.exists() and "HELD" in out.read_text(), 300, shown=out)
    second = submit(1, *command)
    slurm.wait(second)
    refused = (tmp_path / f"out-{second}.txt").read_text()
    assert "trainer.default_local_dir = run: another run is writing there (host n1, process " in refused
    assert f"Slurm job {first}, attempt attempt_0). Wait for it" in refused
    slurm.run("scancel", first)
    slurm.wait(first)


@pytest.mark.full
def test_nobody_joins_without_the_token_of_the_attempt(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path
) -> None:
    job_id = submit(2, *WAIT_ONCE)
    out = tmp_path / f"out-{job_id}.txt"
    wait_for_driver(slurm, job_id, out)
    token = tmp_path / f"logs/{job_id}/attempt_0/.ray_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and len(token.read_text()) == 64
    first, wrong = token.read_text(), tmp_path / "wrong_token"
    wrong.write_text("0" * 64)
    asks = "import ray; ray.init(address='10.99.0.11:6379', log_to_driver=False); print(len(ray.nodes()))"
    for path, is_let_in in ((token, True), (wrong, False)):
        env = ("env", "RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN_PATH={path}", "RAY_raylet_start_wait_time_s=5")
        asked = slurm.run(*env, sys.executable, "-c", asks, host="n2", check=False, timeout_s=120)
        assert (asked.returncode == 0) == is_let_in, asked.stdout + asked.stderr
        assert ("auth" in asked.stderr.lower()) != is_let_in, asked.stderr
    slurm.run("scancel", "--signal=USR1", "--batch", job_id)
    wait_until("the second attempt", lambda: slurm.job(job_id)["Restarts"] == "1")
    slurm.wait(job_id)
    assert not token.exists(), "the attempt is over"
    assert first not in out.read_text()


@pytest.mark.full
@pytest.mark.parametrize(("num_nodes", "spare"), [(3, True), (1, False)])
def test_a_node_whose_ray_does_not_come_up_is_named_at_the_deadline(
    slurm: MiniSlurm,
    submit: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_nodes: int,
    spare: bool,
) -> None:
    """The launcher's own: the `ray start` of a node hangs, the head's where there is no other.

    Where there is a spare one, it is not waited for.
    """
    programs = tmp_path / "venv/bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text(f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')
    (programs / "ray").write_text(
        "import runpy, socket, time\n"
        f"if socket.gethostname() == 'n{min(num_nodes, 2)}':\n    time.sleep(3600)\n"
        f"runpy.run_path({str(Path(sys.prefix, 'bin/ray'))!r}, run_name='__main__')\n"
    )
    for path in programs.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("SCALERL_VENV", str(tmp_path / "venv"))
    monkeypatch.setenv("SCALERL_START_TIMEOUT_S", "60")
    monkeypatch.setenv("SCALERL_MAX_FAILURES", "1")
    if spare:
        monkeypatch.setenv("SCALERL_NUM_NODES", "2")
    job_id = submit(num_nodes, "true")
    job = slurm.wait(job_id)
    out = (tmp_path / f"out-{job_id}.txt").read_text()
    if spare:
        assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0"), out
        assert "without 1 of 3 nodes, 2 are needed:\n  n2: not in the cluster\n" in out
        assert "] Ray is up on 2 nodes\n" in out
        assert_nothing_left(slurm)
        return
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "70:0"), out
    if num_nodes == 1:
        assert "error: Ray's head on n1 did not open port 6379; first to end: deadline, code 124\n" in out
    else:
        assert "1 of 2 nodes not ready after 60 s:\n  n2: not in the cluster\n" in out
        assert "error: Ray is not up on all nodes" in out
    assert "run: true" not in out
    assert_nothing_left(slurm)


@pytest.mark.full
@pytest.mark.parametrize(("num_nodes", "first_to_notice"), [(2, "Slurm"), (2, "Ray")])
def test_the_node_of_the_batch_script_is_lost(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, num_nodes: int, first_to_notice: str
) -> None:
    """Slurm requeues the job: nothing of the launcher is left. The other node, which no attempt gets, cleans up."""
    job_id = submit(num_nodes, *WAIT_ONCE)
    out = tmp_path / f"out-{job_id}.txt"
    wait_for_driver(slurm, job_id, out)
    head = slurm.job(job_id)["BatchHost"]
    others = [host for host in slurm.nodes_of(job_id) if host != head]
    slurm.power_off(head)
    try:
        for host in others:
            if first_to_notice == "Ray":
                kill_raylet(slurm, host)
            slurm.run("scontrol", "update", f"nodename={host}", "state=drain", "reason=test")
        wait_until("second attempt", lambda: slurm.job(job_id)["Restarts"] == "1", 300)
        job = slurm.wait(job_id)
    finally:
        for host in others:
            slurm.run("scontrol", "update", f"nodename={host}", "state=resume")
        slurm.power_on(head)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), out.read_text()
    assert not {head, *others} & {*slurm.nodes_of(job_id)}
    logs = tmp_path / "logs"
    assert os.readlink(logs / job_id / "latest") == "attempt_1" and os.readlink(logs / "latest") == f"{job_id}/latest"
    assert (logs / "latest/driver.log").exists()
    # Of the first attempt: its token, too. Agents of a raylet that was killed look for the head a minute long; where
    # Slurm tracks processes by cgroups they end with the step.
    assert_nothing_left(slurm, timeout_s=90)
    assert not list((logs / job_id).glob("attempt_*/.ray_token"))
    first = logs / f"{job_id}/attempt_0"
    for host in others:
        assert list((first / f"ray/{host}").iterdir())
        said = f"{host}: Slurm ends this job, and its head at 10.99.0.1{head[1:]}:6379 does not answer: Ray ends here"
        assert (said in (first / f"node-{host}.log").read_text()) == (first_to_notice == "Slurm")


@pytest.mark.full
def test_the_launcher_may_be_edited_while_its_job_runs(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path
) -> None:
    """The file of `scalerl launch` calls it where it is; of one that is submitted itself Slurm has a copy."""
    launcher = tmp_path / "launchers/slurm"
    launcher.mkdir(parents=True)
    for script in LAUNCHER.parent.iterdir():
        shutil.copy(script, launcher)
    job = tmp_path / "job.sbatch"
    edit = 'echo "(((" >"$SCALERL_LAUNCHER/ray.sbatch"'
    options = "#SBATCH --exclusive\n#SBATCH --ntasks-per-node=1\n"
    job.write_text(
        f"#!/bin/bash\n{options}export SCALERL_LAUNCHER={launcher}\n"
        f"exec bash $SCALERL_LAUNCHER/ray.sbatch bash -c '{edit}; exit 3'\n"
    )
    job_id = slurm.sbatch("-N1", "--output=out.txt", str(job), cwd=tmp_path)
    ended = slurm.wait(job_id)
    out = (tmp_path / "out.txt").read_text()
    assert ended["ExitCode"] == "3:0" and "exit code 3: not started again" in out, out
    assert_nothing_left(slurm)


@pytest.mark.full
def test_a_job_outlives_a_controller_that_is_away_when_it_is_to_be_requeued(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path
) -> None:
    over = tmp_path / "over"
    first = f'echo SAVES; until [[ -e "{over}" ]]; do sleep 0.2; done; exit 75'
    job_id = submit(2, "bash", "-c", f"[[ $SCALERL_ATTEMPT_DIR == */attempt_0 ]] || exit 0; {first}")
    out = tmp_path / f"out-{job_id}.txt"
    wait_until("the command", lambda: out.exists() and "\nSAVES\n" in out.read_text(), 300, shown=out)
    with slurm.without_controller():
        over.touch()
        wait_until(
            "the wait for Slurm", lambda: "Slurm does not answer, and is waited for" in out.read_text(), shown=out
        )
    assert_came_back(slurm, job_id, out, because="75")
