"""`scalerl launch` on a real Slurm: checks, submits, tells, and ends. Runs to their end: test_two_node_run.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.jobs import Inputs, numbered, only
from tests.slurm.jobs import ENDLESS, Launch, assert_nothing_left, launched_job, overrides, wait_until
from tests.slurm.minislurm import MiniSlurm


def test_all_that_is_wrong_comes_at_once(launch: Launch, small: Inputs, tmp_path: Path) -> None:
    wrong = ["data.train_batch_size=0", "slurm.nodes=9", "slurm.time=61", "slurm.partition=low"]
    done = launch(
        "slurm", *overrides(small, tmp_path / "run", 9, 1, "actor_rollout_ref.model.path=nowhere", *wrong[1:])
    )
    assert done.returncode == 2, done.stdout + done.stderr
    violations = numbered(done.stderr)
    only(violations, "actor_rollout_ref.model.path = nowhere", "no such directory")
    only(violations, "slurm.nodes = 9", "partition low has 4 at most")
    only(violations, "slurm.time = 61", "partition low allows 60 minutes")
    assert not (tmp_path / "run").exists()
    unknown = launch("slurm", "slurm.node=2", *overrides(small, tmp_path / "run", 1, 1, "data.train_batch_size=0"))
    only(numbered(unknown.stderr), "slurm.node", "slurm.nodes")
    only(numbered(unknown.stderr), "data.train_batch_size = 0")


@pytest.mark.full
def test_a_job_is_submitted_watched_and_ended(slurm: MiniSlurm, launch: Launch, small: Inputs, tmp_path: Path) -> None:
    """And another that waits for it, since a run has one job at a time."""
    run_dir = tmp_path / "my run"
    # It runs until it is ended, however long what is asked of it meanwhile takes.
    run = overrides(small, run_dir, 2, 1, ENDLESS, "trainer.experiment_name=mine")
    arguments = ["slurm", *run, "slurm.time=30", "slurm.notice_s=60"]
    dry = launch(*arguments, "--dry-run")
    assert dry.returncode == 0 and "to start at" in dry.stdout, dry.stdout + dry.stderr
    # KillWait of this site is 60 s.
    assert "note    trainer.save_deadline_s=48: set for you" in dry.stdout
    assert "note    trainer.save_freq=-1: a lost node" in dry.stdout
    assert slurm.run("squeue", "-h").stdout == ""
    script = (run_dir / "launch/job.sbatch").read_text()
    assert "trainer.save_deadline_s=48\n" in script
    assert "#SBATCH --nodes=2\n" in script and "#SBATCH --signal=B:USR1@60\n" in script
    assert launch("status", str(run_dir)).returncode == 2

    # Until it ends, which is on one node sooner than on another: the job may get any two.
    all_nodes = ("-N4", "--exclusive", "--time=10", "--output=/dev/null", "--wrap=sleep 600")
    before = slurm.sbatch(*all_nodes, cwd=tmp_path)
    submitted = launch(*arguments)
    job_id = launched_job(submitted)
    for line in (
        f"job     {job_id}: 2 nodes",
        f"output  {run_dir}/logs/slurm-{job_id}.out",
        f"logs    {run_dir}/logs/{job_id}/latest",
        f"attach  scalerl launch attach {run_dir}    (srun --overlap --jobid={job_id} --pty bash)",
        f"cancel  scalerl launch cancel {run_dir}    (scancel {job_id})",
    ):
        assert f"{line}\n" in submitted.stdout
    expected = "expected to start at 20"
    wait_until("an estimate", lambda: expected in launch("status", str(run_dir)).stdout)
    slurm.run("scancel", before)
    wait_until("its turn", lambda: slurm.job(job_id)["JobState"] == "RUNNING")
    assert (run_dir / "launch/job.sbatch").read_text() == script
    again = launch(*arguments)
    assert again.returncode == 2 and f"its job {job_id} is RUNNING" in again.stderr
    waits = "slurm.options={dependency:singleton}"
    assert waits in again.stderr
    second = launched_job(launch(*arguments, waits))
    assert slurm.job(second)["Reason"] == "Dependency"
    nodes = slurm.job(job_id)["NodeList"]
    head, *others = slurm.run("scontrol", "show", "hostnames", nodes).stdout.split()
    assert len(others) == 1
    status = launch("status", str(run_dir))
    assert f"job {job_id}: RUNNING, attempt 0, on {nodes}\n" in status.stdout
    assert f"job {second}: PENDING (Dependency)" in status.stdout
    assert f"logs/slurm-{job_id}.out\n" in status.stdout
    assert "[scalerl " in status.stdout
    last = [head, *others][-1]
    attached = launch("attach", str(run_dir), "--node", last, "bash", "-c", "hostname; echo $SLURM_JOB_ID")
    assert attached.stdout.split() == [last, job_id], attached.stderr
    assert f"job {job_id} attempt 0: head {head}" in launch("logs", str(run_dir), "--lines", "100000").stdout
    assert launch("cancel", str(run_dir)).stdout == f"job {second}: cancelled\njob {job_id}: cancelled\n"
    assert {slurm.wait(each)["JobState"] for each in (job_id, second)} == {"CANCELLED"}
    # Ray was about to start.
    assert_nothing_left(slurm)
    # What a run leaves there.
    (run_dir / "latest_checkpointed_iteration.txt").write_text("7")
    (run_dir / "metrics.jsonl").write_text('{"step": 9, "data": {}}\n')
    with (run_dir / f"logs/slurm-{job_id}.out").open("a") as out:
        out.write("a line of the run\n" * 1000)
    status = launch("status", str(run_dir)).stdout
    assert f"newest  {run_dir / 'global_step_7'}\n" in status and "step    9, logged 0:00:" in status
    assert f"job {second}: CANCELLED" in status


def test_what_slurm_itself_refuses_is_the_users_to_mend(launch: Launch, small: Inputs, tmp_path: Path) -> None:
    refused = launch("slurm", *overrides(small, tmp_path / "run", 1, 1), "slurm.options={nodelist:n9}", "--dry-run")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "job.sbatch: Slurm refuses it: " in refused.stderr and "n9" not in refused.stdout
