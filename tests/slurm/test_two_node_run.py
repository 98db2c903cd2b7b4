"""`scalerl train` on two nodes of a real Slurm, over a notice and a requeue: the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scalerl.cluster.processes import Processes
from scalerl.merge import merge
from tests.e2e.jobs import Inputs, Pause, Record
from tests.e2e.kept import Kept
from tests.slurm.jobs import STEPS, Launch, assert_came_back, assert_nothing_left, launched_job, overrides, wait_until
from tests.slurm.minislurm import MiniSlurm

SAME = ("actor/", "critic/", "response", "prompt_length")


@pytest.fixture(scope="module")
def undisturbed(small: Inputs, processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Number of devices -> directory of a run on that many of this machine, without Slurm, which nobody disturbed."""
    done: dict[int, Path] = {}

    def run(num_devices: int) -> Path:
        if num_devices not in done:
            run_dir = tmp_path_factory.mktemp("undisturbed")
            finished = Kept(processes).train(overrides(small, run_dir, 1, num_devices))
            assert finished.code == 0, finished.tail()
            done[num_devices] = run_dir
        return done[num_devices]

    return run


def weights(run_dir: Path, target: Path) -> dict[str, torch.Tensor]:
    merge(run_dir / f"global_step_{STEPS}" / "actor", target)
    return load_file(target / "model.safetensors")


def assert_same_numbers(run_dir: Path, expected: Path) -> None:
    found, wanted = Record.read(run_dir).final, Record.read(expected).final
    for step in range(1, STEPS + 1):
        same = {key: value for key, value in wanted[step].items() if key.startswith(SAME)}
        assert same["actor/grad_norm"] > 0 and same["critic/score/max"] > same["critic/score/min"]
        assert {key: found[step][key] for key in same} == pytest.approx(same, rel=1e-5, abs=1e-6), f"step {step}"
        assert found[step]["training/rollout_probs_diff_max"] < 1e-4


def assert_same_weights(run_dir: Path, expected: Path, tmp_path: Path) -> None:
    """Bit for bit: as many ranks add up in the same order, wherever they are."""
    ours, theirs = weights(run_dir, tmp_path / "ours"), weights(expected, tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_two_nodes_over_a_requeue_have_the_numbers_and_weights_of_an_undisturbed_run(
    slurm: MiniSlurm, launch: Launch, small: Inputs, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    run_dir, pause = tmp_path / "run", Pause(tmp_path / "pause")
    pause.in_step(1)
    paused = f"+custom_reward_function.reward_kwargs.pause_dir={pause.directory}"
    job_id = launched_job(launch("slurm", *overrides(small, run_dir, 2, 2, paused)))
    out = run_dir / f"logs/slurm-{job_id}.out"
    wait_until("step 1", lambda: pause.reached() or slurm.job(job_id)["JobState"] == "FAILED", 200)
    assert pause.reached(), out.read_text()
    slurm.run("scancel", "--signal=USR1", "--batch", job_id)
    wait_until("the notice", lambda: "got USR1" in out.read_text())
    pause.over()
    assert_came_back(slurm, job_id, out, because="75", logs=run_dir / "logs", timeout_s=300)
    text = out.read_text()
    assert f"resumed from {run_dir / 'global_step_1'}" in text
    assert_same_numbers(run_dir, undisturbed(1))
    assert_same_weights(run_dir, undisturbed(4), tmp_path)
    for attempt in (0, 1):
        found = {path.name for path in (run_dir / f"logs/{job_id}/attempt_{attempt}").glob("*.log")}
        servers = {f"rollout-{index}.log" for index in range(4)}
        assert found == {"driver.log", "node-n1.log", "node-n2.log"} | servers
    merged = launch("logs", str(run_dir), "--all", "--lines", "3").stdout.splitlines()
    assert {line.split(" | ")[0].strip() for line in merged} >= {"driver", "node-n1", "node-n2", "rollout-0"}


@pytest.mark.full
def test_a_rank_of_the_other_node_is_killed_and_started_again_in_the_same_job(
    slurm: MiniSlurm, launch: Launch, small: Inputs, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    run_dir, pause = tmp_path / "run", Pause(tmp_path / "pause")
    pause.in_step(STEPS)
    more = (f"+custom_reward_function.reward_kwargs.pause_dir={pause.directory}", "trainer.save_freq=1")
    job_id = launched_job(launch("slurm", *overrides(small, run_dir, 2, 2, *more)))
    out = run_dir / f"logs/slurm-{job_id}.out"
    wait_until("step 2", lambda: pause.reached() or slurm.job(job_id)["JobState"] == "FAILED", 200)
    assert pause.reached(), out.read_text()
    rank = next(pid for pid, args in slurm.processes("n2") if args.startswith("ray::RankProcess"))
    driver = next(pid for pid, args in slurm.processes("n1") if " train +recipe=" in args and "python" in args)
    environment = slurm.run("cat", f"/proc/{driver}/environ", host="n1").stdout.split("\0")
    (end,) = [text.partition("=")[2] for text in environment if text.startswith("SCALERL_JOB_END_TIME=")]
    assert datetime.fromtimestamp(int(end)).isoformat() == slurm.job(job_id)["EndTime"]
    slurm.run("kill", "-KILL", str(rank), host="n2")
    pause.over()
    job = slurm.wait(job_id, timeout_s=300)
    text = out.read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0"), text
    assert f"The ranks are started again, from {run_dir / 'global_step_1'} (restart 1 of at most 1" in text
    assert ": the process of rank " in text and "0 finished steps are done again" in text
    assert_same_numbers(run_dir, undisturbed(1))
    assert_same_weights(run_dir, undisturbed(4), tmp_path)
    assert_nothing_left(slurm)


@pytest.mark.full
@pytest.mark.parametrize("nnodes", [2, 4])
def test_nodes_of_one_device_have_the_numbers_of_one_process(
    slurm: MiniSlurm,
    submit: Callable[..., str],
    small: Inputs,
    undisturbed: Callable[[int], Path],
    tmp_path: Path,
    nnodes: int,
) -> None:
    run_dir = tmp_path / "run"
    job_id = submit(nnodes, "scalerl", "train", *overrides(small, run_dir, nnodes, 1))
    job = slurm.wait(job_id, timeout_s=400)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), (tmp_path / f"out-{job_id}.txt").read_text()
    assert_same_numbers(run_dir, undisturbed(1))
    assert_same_weights(run_dir, undisturbed(nnodes), tmp_path)
    assert_nothing_left(slurm)
