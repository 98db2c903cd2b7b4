"""SIGTERM or Ctrl-C: everything ends, nothing is left, and the exit code says who ended it."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalerl.base.stop import EXIT_TERMINATED, TERMINATED
from scalerl.checkpoint.store import find_latest_ckpt_path
from scalerl.errors import EXIT_INTERRUPTED
from scalerl.trainer.console_texts import command_line, interrupted_text
from tests.e2e.conftest import StartJob
from tests.e2e.jobs import Inputs, Job, Pause, main_ppo
from tests.e2e.test_sft import overrides as sft_overrides

MORE = (
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The job's directory for temporary files. Of a short name: Ray's sockets lie below it."""
    directory = Path(tempfile.mkdtemp(prefix="e2e-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(directory))
    yield directory
    shutil.rmtree(directory)


def starting_ray(job: Job) -> bool:
    """ray.init is under way: its first server runs."""
    return any("gcs_server" in command for command in job.commands())


@pytest.mark.full
def test_sigterm_in_a_step_of_sft(inputs: Inputs, start_job: StartJob, tmp_path: Path, temporary: Path) -> None:
    run_dir = tmp_path / "run"
    more = ("trainer.total_training_steps=100000", "trainer.save_freq=1", f"trainer.default_local_dir={run_dir}")
    arguments = sft_overrides(inputs, tmp_path, *more)
    job = start_job([sys.executable, "-m", "scalerl.trainer.main_sft", *arguments], tmp_path)
    job.wait_for(lambda: find_latest_ckpt_path(run_dir) is not None, "the first checkpoint")
    assert any(temporary.iterdir()), "the test does not see where Ray is"
    job.kill_driver(signal.SIGTERM)
    assert job.finish() == EXIT_TERMINATED, job.tail()
    assert f"The checkpoint {find_latest_ckpt_path(run_dir)} stands. " in job.stderr
    assert job.stderr == f"{TERMINATED}\n{interrupted_text(str(run_dir), 'sft', arguments)}\n", job.tail()
    job.assert_gone()
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []


@pytest.mark.parametrize("moment", [pytest.param("start", marks=pytest.mark.full), "step"])
def test_sigterm(inputs: Inputs, start_job: StartJob, tmp_path: Path, temporary: Path, moment: str) -> None:
    run_dir, pause = tmp_path / "run", Pause(tmp_path / "pause")
    pause.in_step(1)
    paused = f"+custom_reward_function.reward_kwargs.pause_dir={pause.directory}"
    arguments = inputs.overrides(run_dir, *MORE, paused)
    job = start_job(main_ppo(arguments), tmp_path)
    if moment == "start":
        job.wait_for(lambda: starting_ray(job), "the start of Ray")
    else:
        job.wait_for(pause.reached, "the first step")
    assert (moment == "start") or any(temporary.iterdir()), "the test does not see where Ray is"
    job.kill_driver(signal.SIGTERM)
    assert job.finish() == EXIT_TERMINATED, job.tail()
    # No crash dump of Ray's, no stack.
    how_to_continue = interrupted_text(str(run_dir), "train", arguments, "processes" if moment == "start" else None)
    assert job.stderr == f"{TERMINATED}\n{how_to_continue}\n", job.tail()
    job.assert_gone()
    # torch's cache of compiled code is one per user.
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        ("loading", "Stopped while the configuration was read and the programs of the run were loaded"),
        ("checks", "Stopped while data, models, rewards and your own code were checked"),
    ],
)
def test_ctrl_c_before_anything_is_started(
    inputs: Inputs, start_job: StartJob, tmp_path: Path, moment: str, said: str
) -> None:
    run_dir, reached = tmp_path / "run", tmp_path / "reached"
    own = tmp_path / "own.py"
    own.write_text(f"import pathlib, time\npathlib.Path({str(reached)!r}).touch()\ntime.sleep(60)\n")
    # A key of verl has a line as soon as the configuration is read, seconds before torch and megatron are imported.
    arguments = inputs.overrides(run_dir, *MORE, f"trainer.import_files=[{own}]", "trainer.balance_batch=true")
    job = start_job(main_ppo(arguments), tmp_path)
    is_there = reached.exists if moment == "checks" else (lambda: "trainer.balance_batch=true" in job.stdout)
    job.wait_for(is_there, moment)
    job.interrupt()
    # Python run with -m ends by the signal itself where it came inside an `exec` of text, as dataclasses make at an
    # import, though it was handled and the code is 130; a shell reports 130 for both.
    assert job.finish() in (EXIT_INTERRUPTED, -signal.SIGINT), job.tail()
    assert job.stderr == (
        f"{said}: nothing was started, and nothing saved. There is no checkpoint in {run_dir} yet. To go on (from the "
        f"start):\n  {command_line('train', arguments)}\nInterrupted.\n"
    )
    assert not run_dir.exists()
    job.assert_gone()
