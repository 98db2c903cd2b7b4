"""Jobs that wait for one another, and arrays with a run for each seed, on a real Slurm."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.e2e.jobs import Inputs, Record
from tests.slurm.jobs import (
    ENDLESS,
    WAIT_ONCE,
    Launch,
    assert_came_back,
    assert_nothing_left,
    launched_job,
    overrides,
    wait_for_driver,
    wait_until,
)
from tests.slurm.minislurm import MiniSlurm

SEEDS = (3, 1234)


@pytest.mark.full
def test_a_job_of_a_chain_waits_until_the_one_before_it_is_over(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path
) -> None:
    """A job that is requeued is not over."""
    named = "--job-name=chain"
    first = submit(1, *WAIT_ONCE, options=(named,))
    second = submit(1, "true", options=(named, "--dependency=singleton"))
    third = submit(1, "true", options=(f"--dependency=afterany:{first}:{second}",))
    out = tmp_path / f"out-{first}.txt"
    wait_for_driver(slurm, first, out)
    assert {slurm.job(job_id)["Reason"] for job_id in (second, third)} == {"Dependency"}
    slurm.run("scancel", "--signal=USR1", "--batch", first)
    wait_until("the requeue", lambda: slurm.job(first)["Restarts"] == "1")
    assert [slurm.job(job_id)["JobState"] for job_id in (second, third)] == ["PENDING", "PENDING"]
    jobs = [slurm.wait(job_id) for job_id in (first, second, third)]
    assert [(job["JobState"], job["Restarts"]) for job in jobs] == [("COMPLETED", each) for each in ("1", "0", "0")]
    for before, after in pairwise(jobs):
        assert before["EndTime"] <= after["StartTime"]
    assert_nothing_left(slurm)


@pytest.mark.full
def test_tasks_of_an_array_come_back_each_on_its_own(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path
) -> None:
    """Slurm gives one of them the number of the whole array."""
    array = submit(1, *WAIT_ONCE, options=("--array=0-1", "--output=out-%A_%a.txt"))
    tasks = [f"{array}_{place}" for place in (0, 1)]
    for done, task in enumerate(tasks, 1):
        out = tmp_path / f"out-{task}.txt"
        wait_for_driver(slurm, task, out)
        slurm.run("scancel", "--signal=USR1", "--batch", task)
        assert_came_back(slurm, task, out, because="75", alone=False)
        assert [slurm.job(each)["Restarts"] for each in tasks] == ["1"] * done + ["0"] * (len(tasks) - done)
    assert_nothing_left(slurm)


@pytest.mark.full
def test_runs_of_seeds_are_submitted_watched_and_ended(
    slurm: MiniSlurm, launch: Launch, small: Inputs, tmp_path: Path
) -> None:
    run_dir = tmp_path / "my runs"
    # The first still runs when the second has been cancelled.
    array = launched_job(
        launch("slurm", *overrides(small, run_dir, 1, 1, ENDLESS), f"slurm.seeds=[{SEEDS[0]},{SEEDS[1]}]")
    )
    wait_until("the tasks", lambda: {slurm.job(f"{array}_{i}")["JobState"] for i in (0, 1)} == {"RUNNING"})
    status = launch("status", str(run_dir)).stdout
    for place, seed in enumerate(SEEDS):
        assert f"run     {run_dir / f'seed_{seed}'}\njob {array}_{place}: RUNNING, attempt 0, on n" in status
    refused = launch("logs", str(run_dir))
    assert refused.returncode == 2 and f"give one of {run_dir / f'seed_{SEEDS[0]}'}, " in refused.stderr
    last = str(run_dir / f"seed_{SEEDS[1]}")
    attached = launch("attach", last, "bash", "-c", "echo $SLURM_JOB_ID")
    assert attached.stdout.strip() == slurm.job(f"{array}_1")["JobId"], attached.stderr
    assert launch("cancel", last).stdout == f"job {array}_1: cancelled\n"
    assert slurm.wait(f"{array}_1")["JobState"] == "CANCELLED"
    assert slurm.job(f"{array}_0")["JobState"] == "RUNNING"
    assert launch("cancel", str(run_dir)).stdout == f"job {array}: cancelled\n"
    assert slurm.wait(f"{array}_0")["JobState"] == "CANCELLED"
    assert_nothing_left(slurm)


@pytest.mark.full
def test_every_seed_has_a_run_of_its_own(slurm: MiniSlurm, launch: Launch, small: Inputs, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    run_dir = tmp_path / "run"
    more = ["trainer.logger=[console,file,mlflow]", "trainer.experiment_name=five", "trainer.save_freq=0"]
    done = launch("slurm", *overrides(small, run_dir, 1, 1, *more), f"slurm.seeds=[{SEEDS[0]},{SEEDS[1]}]")
    array = launched_job(done)
    scores = []
    for place, seed in enumerate(SEEDS):
        job = slurm.wait(f"{array}_{place}", timeout_s=400)
        own_dir = run_dir / f"seed_{seed}"
        out = (run_dir / f"logs/slurm-{array}_{place}.out").read_text()
        assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), out
        client = MlflowClient(tracking_uri=f"sqlite:///{own_dir / 'mlflow.db'}")
        (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
        assert (run.info.run_name, run.info.status) == (f"five-seed-{seed}", "FINISHED")
        assert run.data.params["data.seed"] == run.data.params["actor_rollout_ref.rollout.seed"] == str(seed)
        scores.append(Record.read(own_dir).final[1]["actor/grad_norm"])
        assert (own_dir / f"logs/{array}_{place}/attempt_0/driver.log").exists()
    assert scores[0] != scores[1]
    assert_nothing_left(slurm)
