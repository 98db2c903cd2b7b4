"""Saves in the background of whole runs, on file systems that fill up or are slow: told, finished, never half there."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from scalerl.base.stop import EXIT_REQUEUE, EXIT_TERMINATED
from scalerl.checkpoint.store import integrity_problem
from scalerl.errors import EXIT_FAILED
from tests.e2e.conftest import StartJob
from tests.e2e.jobs import Inputs, Record, main_ppo
from tests.e2e.kept import Kept
from tests.filesystems import mounted, slow


def keys(inputs: Inputs, run_dir: Path, rollouts: Path, *more: str) -> list[str]:
    return inputs.overrides(
        run_dir,
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=false",
        "trainer.save_freq=1",
        "trainer.async_save=true",
        "trainer.max_rank_restarts=0",
        f"trainer.rollout_data_dir={rollouts}",
        *more,
    )


@pytest.mark.full
def test_a_save_that_fails_in_the_background_is_told_in_its_step(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    """There is room for one checkpoint: the run goes on without others, and ends with the error of the last one."""
    with mounted(tmp_path / "run", "size=9m") as run_dir:
        finished = kept.train(keys(inputs, run_dir, tmp_path / "rollouts", "trainer.total_training_steps=4"))
        assert finished.code == EXIT_FAILED, finished.tail()
        first = run_dir / "global_step_1"
        said = [line for line in finished.stdout.splitlines() if "the checkpoint of step 2 was not written" in line]
        assert len(said) == 1 and "No space left on device" in said[0], finished.tail()
        assert said[0].endswith(f"; the run goes on; the newest checkpoint is {first}")
        assert "No space left on device" in finished.stderr
        logged = Record.read(run_dir).final
        # In the step in which it is known: the save of step 2 ends while step 3 runs, at the latest. Where a save has
        # taken all the room at that moment, the line is written later.
        told = {step: data.get("checkpoint/failed_saves") for step, data in logged.items()}
        assert told.keys() >= {1, 2, 3} and (told[2] or told[3]), (told, finished.stderr[-600:])
        assert [path.name for path in run_dir.glob("global_step_*")] == ["global_step_1"]
        assert integrity_problem(first, digests=True) is None


@pytest.mark.full
@pytest.mark.parametrize(("deadline_s", "code"), [(0, EXIT_TERMINATED), (120, EXIT_REQUEUE)])
def test_a_stop_finishes_the_save_that_is_being_written(
    inputs: Inputs, start_job: StartJob, tmp_path: Path, deadline_s: int, code: int
) -> None:
    """SIGTERM while a checkpoint is written, slowly: it is finished; with a deadline the step is, too, and is saved."""
    with slow(tmp_path / "run", 0.0001) as run_dir:
        more = ["trainer.total_training_steps=50", f"trainer.save_deadline_s={deadline_s}"]
        job = start_job(main_ppo(keys(inputs, run_dir, tmp_path / "rollouts", *more)), tmp_path / "job")
        job.wait_for(lambda: any(run_dir.glob("global_step_2.tmp-*")), "the second save")
        # Before it is logged the step would be done again.
        job.wait_for(lambda: 2 in Record.read(run_dir).final, "the line of the second step")
        assert not (run_dir / "global_step_2").exists()
        job.kill_driver(signal.SIGTERM)
        assert job.finish() == code, job.tail()
        job.assert_gone()
        saved = sorted(run_dir.glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
        last = int((run_dir / "latest_checkpointed_iteration.txt").read_text())
        assert [path.name for path in saved] == [f"global_step_{step}" for step in range(1, last + 1)]
        assert all(integrity_problem(path, digests=True) is None for path in saved)
        assert last == 2 if deadline_s == 0 else last == max(Record.read(run_dir).final) >= 2
