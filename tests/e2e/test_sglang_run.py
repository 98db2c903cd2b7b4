"""The main job with a real SGLang server: nothing is left of it when a signal ends it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from scalerl.checkpoint.store import find_latest_ckpt_path, integrity_problem
from scalerl.errors import EXIT_INTERRUPTED
from scalerl.trainer.console_texts import command_line
from tests.e2e.conftest import StartJob
from tests.e2e.jobs import Inputs, Job, Pause, main_ppo


def arguments(inputs: Inputs, run_dir: Path, *more: str) -> list[str]:
    return main_ppo(
        inputs.overrides(
            run_dir,
            "actor_rollout_ref.rollout.name=sglang",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            "trainer.total_training_steps=2",
            *more,
        )
    )


@pytest.fixture
def generating(inputs: Inputs, start_job: StartJob, tmp_path: Path) -> Job:
    """A job in the middle of the generation of step 2; step 1 is saved."""
    pause = Pause(tmp_path / "pause")
    pause.in_step(2)
    job = start_job(
        arguments(
            inputs,
            tmp_path / "run",
            "trainer.val_before_train=false",
            "trainer.save_freq=1",
            f"+custom_reward_function.reward_kwargs.pause_dir={pause.directory}",
        ),
        tmp_path,
    )
    job.wait_for(pause.reached, "the generation of step 2")
    assert any("sglang" in command for command in job.commands())
    return job


@pytest.mark.full
def test_ctrl_c_leaves_nothing(generating: Job) -> None:
    generating.interrupt()
    assert generating.finish(120) == EXIT_INTERRUPTED, generating.tail()
    # Which checkpoint stands, and the command to go on.
    saved = generating.directory / "run" / "global_step_1"
    given = list(generating.arguments[len(main_ppo([])) :])
    assert generating.stderr == (
        f"The checkpoint {saved} stands. To go on:\n  {command_line('train', given)}\nInterrupted.\n"
    )
    assert find_latest_ckpt_path(saved.parent) == str(saved) and integrity_problem(saved, digests=True) is None
    generating.assert_gone()


@pytest.mark.full
def test_sigkill_of_the_driver_leaves_nothing(generating: Job) -> None:
    generating.kill_driver(signal.SIGKILL)
    assert generating.finish(60) == -signal.SIGKILL
    generating.assert_gone()
