"""A run that loses a rank goes on in its own process to the numbers that it would have had, once or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from scalerl.checkpoint.store import TRACKER_NAME
from scalerl.errors import EXIT_FAILED
from scalerl.rollout.servers.process import free_port
from tests.e2e.conftest import StartJob
from tests.e2e.jobs import Inputs, Record, main_ppo
from tests.e2e.kept import Finished, Kept
from tests.e2e.rank_strikes import RankStrikes, killed_when, rank_in
from tests.e2e.test_kill_and_resume import (
    STEPS,
    assert_one_mlflow_run,
    assert_same_run,
    mlflow_run_id,
    overrides,
    reproducible,
)
from tests.e2e.test_sft import overrides as sft_overrides
from tests.lanes import full

# Of a Ray cluster that a test starts itself.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "1" * 64}
RESTARTS = ("training/num_rank_restarts", "training/redone_steps", "training/restart_lost_s")


@pytest.fixture(scope="module")
def undisturbed(inputs: Inputs, kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    run_dir = directory / "run"
    strikes = RankStrikes(directory / "strikes", run_dir).in_update(1, times=0)
    finished = kept.train([*overrides(inputs, "tp2", run_dir), *strikes])
    assert finished.code == 0, finished.tail()
    assert not any(key in data for data in Record.read(run_dir).final.values() for key in RESTARTS)
    return run_dir


def losses(run_dir: Path) -> dict[int, tuple[float, ...]]:
    """Step that the run went on from -> the metrics of its restart there, the last one of several."""
    logged = {step: data for step, data in Record.read(run_dir).lines if RESTARTS[0] in data}
    return {step: tuple(data[key] for key in RESTARTS) for step, data in logged.items()}


def assert_restarted(ended: Finished, said: str, run_dir: Path, *, at: int, redone: int, died: str) -> None:
    """said: in its log.  at: the step that it went on from.  died: the call in which the rank was missed."""
    assert ended.code == 0, ended.tail()
    assert re.search(rf"{died}: the process of rank 1 \(.*\) died", said), said
    goes_on = f"from {run_dir / f'global_step_{at}'}" if at else "from the beginning"
    assert f"The ranks are started again, {goes_on} (restart 1 of at most 1" in said
    assert f"restarted after step {at}: {redone} finished steps are done again" in ended.stdout
    ((step, (number, steps, lost_s)),) = losses(run_dir).items()
    assert (step, number, steps) == (at, 1.0, float(redone)) and lost_s > 0


@pytest.mark.parametrize("place", ["update", full("generation"), full("save"), full("first step")])
def test_a_rank_is_killed(
    inputs: Inputs, kept: Kept, undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """The server goes on, and serves what the new ranks send."""
    run_dir = tmp_path / "run"
    strikes = RankStrikes(tmp_path / "strikes", run_dir)
    step = 1 if place == "first step" else STEPS
    struck = strikes.in_generation(step) if place == "generation" else strikes.in_update(step, times=place != "save")
    saves = lambda: place == "save" and any(run_dir.glob(f"global_step_{STEPS}.tmp-*"))  # noqa: E731
    with killed_when(saves, lambda: strikes.pid(1)):
        ended = kept.train([*overrides(inputs, "tp2", run_dir), *struck])
    # Step 3 is finished and not saved; the last step, too, where its save is interrupted.
    at, redone = (0, 0) if step == 1 else (2, 2 if place == "save" else 1)
    died = {"generation": "compute_log_prob", "save": "save_checkpoint"}.get(place, "update_actor")
    assert_restarted(ended, caplog.text, run_dir, at=at, redone=redone, died=died)
    assert_same_run(undisturbed, run_dir, tmp_path)
    assert_one_mlflow_run(run_dir, mlflow_run_id(run_dir, 2))
    assert not any(run_dir.glob("*.tmp-*"))
    (log,) = (run_dir / "logs").glob("rollout-*.log")
    assert log.is_file() and log.stat().st_size


@pytest.mark.full
def test_a_rank_is_stopped_and_nobody_comes_to_the_collective(
    inputs: Inputs, kept: Kept, undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The report of the hang is made; then the stopped process, too, is gone."""
    run_dir = tmp_path / "run"
    strikes = RankStrikes(tmp_path / "strikes", run_dir)
    struck = strikes.in_update(STEPS, signum=signal.SIGSTOP)
    ended = kept.train([*overrides(inputs, "tp2", run_dir), *struck, "trainer.timeout_s=30"])
    assert ended.code == 0, ended.tail()
    assert "did not answer within trainer.timeout_s=30 s; missing in gloo:" in caplog.text
    assert losses(run_dir)[2][:2] == (1.0, 1.0)
    ((stopped,),) = [[int(mark.name.partition("-")[2]) for mark in strikes.directory.glob("struck-*")]]
    assert not psutil.pid_exists(stopped)
    assert any((run_dir / "logs").glob("hang-update_actor-*.txt"))
    assert_same_run(undisturbed, run_dir, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("restarts", [0, 2])
def test_a_rank_that_is_lost_every_time_ends_the_run_with_70(
    inputs: Inputs, start_job: StartJob, undisturbed: Path, tmp_path: Path, restarts: int
) -> None:
    run_dir = tmp_path / "run"
    strikes = RankStrikes(tmp_path / "strikes", run_dir)
    struck = strikes.in_update(STEPS, times=100)
    job = start_job(
        main_ppo([*overrides(inputs, "tp2", run_dir), *struck, f"trainer.max_rank_restarts={restarts}"]), run_dir
    )
    assert job.finish() == EXIT_FAILED, job.tail()
    job.assert_gone()
    assert len(list(strikes.directory.glob("struck-*"))) == restarts + 1
    error = f"\n{job.stderr}".rpartition("\nerror: ")[2]
    why = f"Not restarted: the ranks were restarted {restarts} times, trainer.max_rank_restarts={restarts}"
    assert error.startswith("update_actor") and (why in error) is (restarts > 0)
    assert "Traceback (most recent call last)" not in error
    wanted = {step: reproducible(data) for step, data in Record.read(undisturbed).final.items() if step < STEPS}
    assert {step: reproducible(data) for step, data in Record.read(run_dir).final.items()} == {
        step: data for step, data in wanted.items() if step <= 3
    }


@pytest.mark.full
def test_a_rank_is_killed_beside_sglang(inputs: Inputs, start_job: StartJob, tmp_path: Path) -> None:
    """Its server is not started again; its samples are others from the step on that is done again."""
    run_dir = tmp_path / "run"
    struck = RankStrikes(tmp_path / "strikes", run_dir).in_update(3)
    more = ["actor_rollout_ref.rollout.name=sglang", "trainer.total_training_steps=3", "trainer.save_freq=2"]
    job = start_job(main_ppo(inputs.overrides(run_dir, *struck, *more, "trainer.val_before_train=false")), run_dir)
    assert job.finish() == 0, job.tail()
    job.assert_gone()
    record = Record.read(run_dir).final
    assert sorted(record) == [1, 2, 3] and losses(run_dir)[2][:2] == (1.0, 0.0)
    for step, data in record.items():
        assert data["training/rollout_probs_diff_max"] < 1e-4 and data["actor/grad_norm"] > 0, step
    log = (run_dir / "logs" / "rollout-0.log").read_text(errors="replace")
    assert log.count("The server is fired up") <= 1 and len(list((run_dir / "logs").glob("rollout-0*"))) == 1


@pytest.mark.full
def test_a_rank_is_killed_in_fine_tuning(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    # Steps are short: the process may die in any of the many after the one that is waited for.
    steps, saved = 40, 21
    more = [f"trainer.total_training_steps={steps}", f"trainer.save_freq={saved}", "trainer.test_freq=2"]

    def train(name: str) -> Finished:
        run_dir = tmp_path / name
        return kept.sft([*sft_overrides(inputs, tmp_path, *more), f"trainer.default_local_dir={run_dir}"])

    seen: list[int] = []

    def is_struck() -> bool:
        if (pid := rank_in("update_sft")) is not None:
            seen.append(pid)
        return bool(seen) and saved + 1 in Record.read(tmp_path / "struck").final

    assert train("whole").code == 0
    with killed_when(is_struck, lambda: seen[-1]):
        ended = train("struck")
    assert ended.code == 0, ended.tail()
    ((step, (number, redone, lost_s)),) = losses(tmp_path / "struck").items()
    assert (step, number) == (saved, 1.0) and 1 <= redone <= steps - saved and lost_s > 0
    metrics_by_step, wanted = (
        {s: reproducible(d) for s, d in Record.read(tmp_path / n).final.items()} for n in ("struck", "whole")
    )
    assert (
        metrics_by_step == wanted
        and sorted(metrics_by_step) == list(range(steps + 1))
        and metrics_by_step[steps]["train/grad_norm"] > 0
    )
    pieces = [final_pieces(tmp_path / name, steps) for name in ("struck", "whole")]
    assert pieces[0] and pieces[0] == pieces[1]


@pytest.fixture
def three_nodes(tmp_path: Path) -> Iterator[tuple[str, list[psutil.Process]]]:
    """Three nodes of a Ray cluster on this machine, a place each: its address, and the raylets, the head's first."""
    temporary = Path(tempfile.mkdtemp(prefix="rr-", dir="/tmp"))
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1", "--num-gpus=0"]
    ray += ["--disable-usage-stats", "--memory=1000000000", "--object-store-memory=100000000"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | TOKEN
    started: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> psutil.Process:
        log = tmp_path / f"node-{len(started)}.txt"
        with log.open("wb") as out:
            started.append(subprocess.Popen([*ray, *options], env=environment, stdout=out, stderr=out))
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and started[-1].poll() is None:
            for process in psutil.Process(started[-1].pid).children():
                if process.name() == "raylet":
                    return process
            time.sleep(0.1)
        raise AssertionError(log.read_text())

    try:
        port = free_port("127.0.0.1")
        head_options = (f"--port={port}", "--include-dashboard=false", f"--temp-dir={temporary}")
        head = start("--head", "--node-ip-address=127.0.0.1", *head_options)
        address = f"127.0.0.1:{port}"
        yield address, [head, *(start(f"--address={address}", "--node-ip-address=127.0.0.1") for _ in range(2))]
    finally:
        for node in reversed(started):
            below = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
            for process in [*below, node]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            node.wait()
        shutil.rmtree(temporary, ignore_errors=True)


@pytest.mark.full
def test_a_rank_of_a_lost_node_starts_again_on_a_spare_one(
    inputs: Inputs, kept: Kept, start_job: StartJob, three_nodes: tuple[str, list[psutil.Process]], tmp_path: Path
) -> None:
    address, (_, *others) = three_nodes
    more = ["trainer.total_training_steps=400", "trainer.save_freq=20", "trainer.max_actor_ckpt_to_keep=1"]
    more += ["trainer.test_freq=-1", "data.val_files=null"]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert kept.sft([*sft_overrides(inputs, tmp_path, *more), f"trainer.default_local_dir={whole}"]).code == 0
    more += ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", f"trainer.default_local_dir={run_dir}"]
    token = [f"{name}={value}" for name, value in TOKEN.items()]
    command = ["env", f"RAY_ADDRESS={address}", *token, sys.executable, "-m", "scalerl.trainer.main_sft"]
    job = start_job([*command, *sft_overrides(inputs, tmp_path, *more)], run_dir)
    job.wait_for((run_dir / TRACKER_NAME).is_file, "the first checkpoint")
    holders = [node for node in others if any(below.name().startswith("ray::Rank") for below in node.children())]
    assert holders, "a rank is on another node than the driver"
    holders[0].kill()
    assert job.finish() == 0, job.tail()
    assert "(restart 1 of at most 1" in job.stderr
    ((step, (number, _, lost_s)),) = losses(run_dir).items()
    assert step >= 20 and step % 20 == 0 and number == 1.0 and lost_s > 0
    assert final_pieces(run_dir, 400) == final_pieces(whole, 400) != {}


def final_pieces(run_dir: Path, step: int) -> dict[str, str]:
    """File -> digest, of what ranks wrote in the checkpoint."""
    digests = json.loads((run_dir / f"global_step_{step}" / "COMPLETE").read_text())["digests"]
    return {file: digest for file, digest in digests.items() if file.endswith(".distcp")}
