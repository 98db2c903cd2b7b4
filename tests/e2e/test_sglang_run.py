"""The main job with real SGLang servers: nothing is left of them when a signal ends it, and servers in fp8."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from scalerl.checkpoint.store import find_latest_ckpt_path, integrity_problem
from scalerl.errors import EXIT_INTERRUPTED
from scalerl.trainer.console_texts import command_line
from tests.e2e.conftest import StartJob
from tests.e2e.jobs import Inputs, Job, Pause, Record, main_ppo
from tests.e2e.kept import Kept
from tests.tiny_models import make_tiny_model


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


@pytest.mark.full
def test_servers_in_fp8_and_a_trainer_that_is_not(kept: Kept, inputs: Inputs, tmp_path: Path) -> None:
    """Every sync is verified; the mismatch shows, and tokens are weighed without a key that says so."""
    model = make_tiny_model(tmp_path / "model", "qwen3", hidden_size=256, head_dim=128)
    steps = {}
    for quantization in ("null", "fp8"):
        run_dir = tmp_path / quantization
        arguments = Inputs(model, inputs.train, inputs.val).overrides(
            run_dir,
            "actor_rollout_ref.rollout.name=sglang",
            f"actor_rollout_ref.rollout.quantization={quantization}",
            "actor_rollout_ref.rollout.verify_weights_every=1",
            "data.max_prompt_length=64",
            "actor_rollout_ref.actor.max_tokens_per_micro_batch=160",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            "trainer.n_gpus_per_node=2",
            "trainer.total_training_steps=2",
        )
        finished = kept.train(arguments)
        assert finished.code == 0, finished.tail()
        steps[quantization] = Record.read(run_dir).final
    for step in (1, 2):
        plain, rounded = steps["null"][step], steps["fp8"][step]
        assert plain["rollout_corr/k3_kl"] < 1e-6 < 1e-4 < rounded["rollout_corr/k3_kl"]
        assert "rollout_corr/rollout_is_mean" in rounded and "rollout_corr/rollout_is_mean" not in plain
