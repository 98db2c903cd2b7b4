"""The main job with a real SGLang server: what it reports of itself, and what is left of it in every kind of end."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from scalerl.errors import EXIT_INTERRUPTED
from tests.e2e.conftest import StartJob
from tests.e2e.jobs import PROMPTS, SAMPLES, Inputs, Job, Pause, Record, main_ppo
from tests.e2e.step_checks import check_timing
from tests.unit.metrics.test_documented_keys import DOC, patterns

STEPS = 2
# Of the recipe `cpu`.
BUCKET_MIB = 64
# All of it, so that every metric of it is there; the thresholds are far from what two float32 engines differ by.
CORRECTION = [
    f"algorithm.rollout_correction.{setting}"
    for setting in (
        "rollout_is=token",
        "rollout_is_batch_normalize=true",
        "rollout_rs=[token_k1,seq_mean_k3]",
        "rollout_rs_threshold=[[0.5,2],0.01]",
        "rollout_token_veto_threshold=1e-4",
    )
]
# Documented, but not of a GRPO run in float32 of a dense model with a reference, a reward function that returns a
# number, one validation sample and a checkpoint after its last step.
ABSENT = re.compile(
    r"train/|val/loss|reward_extra/|reward/num_judge_restarts|.*(best|std|worst|maj|pass)@|val-aux/.*mean@|critic/baseline_score"
    r"|actor/(loss_scale|moe_|cov_selected_frac|reward_kl_penalty)"
    r"|critic/(values|vf_|vpred_|grad_norm|lr|num_updates|skipped_updates|loss_scale)|perf/mfu/critic"
    r"|timing_(s|per_token_ms)/(values|update_critic|reward_model|updateZ)"
    r"|perf/memory_(peak|current)_gb/(reward_model|values|update_critic|testing|save_checkpoint|load_checkpoint)"
    # On a CPU servers release nothing.
    r"|perf/handover/(kv|weights)_gb|perf/handover/(free|used)_gb/(before_release|after_release_kv|after_resume)"
    r"|timing_s/(gen/release_|update_weights/resume_|testing/offload)"
)


def arguments(inputs: Inputs, run_dir: Path, *more: str) -> list[str]:
    return main_ppo(
        inputs.overrides(
            run_dir,
            "actor_rollout_ref.rollout.name=sglang",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            f"trainer.total_training_steps={STEPS}",
            *more,
        )
    )


@dataclass(frozen=True)
class Finished:
    job: Job
    metrics: dict[int, dict[str, float]]

    def steps(self) -> list[dict[str, float]]:
        return [self.metrics[step] for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def finished(inputs: Inputs, start_job: StartJob, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run_dir = tmp_path_factory.mktemp("sglang")
    # The model leaves its device whenever it does not compute.
    offload = [f"actor_rollout_ref.actor.megatron.{part}_offload=true" for part in ("param", "grad", "optimizer")]
    more = ["trainer.save_freq=2", "trainer.test_freq=1", *offload, *CORRECTION]
    job = start_job(arguments(inputs, run_dir, *more), run_dir)
    server = "scalerl.servers.sglang.launch"
    job.wait_for(lambda: (run_dir / "logs" / "rollout-0.log").exists(), "the start of the server")
    job.wait_for(lambda: any(server in line for line in job.commands()), "the server's process")
    job.wait_for(lambda: 1 in Record.read(run_dir).final, "step 1")
    job.look()
    assert job.finish() == 0, job.tail()
    return Finished(job, Record.read(run_dir).final)


def test_sampler_and_trainer_agree(finished: Finished) -> None:
    for data in finished.steps():
        # Old log-probs are computed by the weights that the first update starts from, on the same packed
        # micro-batches: the same sums in the same order, so nothing is rounded differently.
        assert data["actor/ppo_kl_first_update"] == 0.0
        assert data["actor/pg_clipfrac_first_update"] == 0.0
        # Two engines, both float32. In step 2 the server has the synced weights of step 1, or this would be far off.
        assert data["training/rollout_probs_diff_valid"] == 1.0
        assert data["training/rollout_probs_diff_max"] < 1e-4
        assert -1e-4 < data["rollout_corr/token_log_ratio_min"] <= data["rollout_corr/token_log_ratio_max"] < 1e-4
        # Of that size is what a correction finds.
        assert data["rollout_corr/rollout_is_min"] == pytest.approx(1.0, abs=1e-4)
        assert data["rollout_corr/rollout_rs_masked_fraction"] == data["actor/rejected_updates"] == 0.0
        assert data["actor/grad_norm"] > 0
        assert data["actor/num_updates"] == 2.0


def test_weights_are_verified_after_every_sync(finished: Finished) -> None:
    for data in finished.steps():
        assert data["timing_s/update_weights/verify"] > 0
        assert data["perf/update_weights_gb"] > 0
        seconds = data["timing_s/update_weights/send"]
        assert data["perf/update_weights_gb_per_s"] == pytest.approx(data["perf/update_weights_gb"] / seconds)
        assert data["perf/update_weights_buckets"] == 1
        assert data["perf/update_weights_bucket_mb"] == BUCKET_MIB


def test_memory_is_measured_at_each_point_of_the_hand_over(finished: Finished) -> None:
    for data in finished.steps():
        for point in ("after_release", "before_sync", "after_sync"):
            assert data[f"perf/handover/free_gb/{point}"] > 0 < data[f"perf/handover/used_gb/{point}"]
        # Everything of the model comes and goes.
        for part in ("old_log_prob", "ref", "update_actor", "update_weights"):
            assert 0 < data[f"timing_s/{part}/offload"] < data[f"timing_s/{part}"]


def test_every_documented_key_is_there_and_no_other(finished: Finished) -> None:
    documented = patterns(DOC.read_text(encoding="utf-8"))
    keys = set().union(*finished.steps(), finished.metrics[0])
    assert sorted(key for key in keys if not any(pattern.match(key) for pattern in documented)) == []
    lacking = [pattern.pattern for pattern in documented if not any(pattern.match(key) for key in keys)]
    assert [text for text in lacking if not ABSENT.match(text.replace("\\", ""))] == []


def test_parts_add_up_to_the_step(finished: Finished) -> None:
    phases = ("gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights", "testing", "save_checkpoint")
    for data in finished.steps():
        check_timing(data)
    assert {f"timing_s/{name}" for name in phases} <= data.keys()


def test_lines_for_a_person(finished: Finished) -> None:
    """Not a terminal: plain lines, one per step; nothing on standard error."""
    lines = [line for line in finished.job.stdout.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["0/2", "1/2", "2/2"]
    for line in lines[1:]:
        assert all(f"  {name} " in line for name in ("reward", "len", "tok/s", "update", "val"))
    assert "\x1b" not in finished.job.stdout
    samples = rf"= samples per step +{PROMPTS * SAMPLES}\b"
    assert re.search(samples, finished.job.stdout)
    assert finished.job.stderr == ""


def test_nothing_is_left_after_the_end(finished: Finished) -> None:
    finished.job.assert_gone()


@pytest.fixture
def generating(inputs: Inputs, start_job: StartJob, tmp_path: Path) -> Job:
    """A job in the middle of the generation of step 1."""
    pause = Pause(tmp_path / "pause")
    pause.in_step(1)
    job = start_job(
        arguments(
            inputs,
            tmp_path / "run",
            "trainer.val_before_train=false",
            f"+custom_reward_function.reward_kwargs.pause_dir={pause.directory}",
        ),
        tmp_path,
    )
    job.wait_for(pause.reached, "the generation of step 1")
    assert any("sglang" in command for command in job.commands())
    return job


@pytest.mark.full
def test_ctrl_c_leaves_nothing(generating: Job) -> None:
    generating.interrupt()
    assert generating.finish(120) == EXIT_INTERRUPTED, generating.tail()
    assert generating.stderr == "Interrupted.\n"
    generating.assert_gone()


@pytest.mark.full
def test_sigkill_of_the_driver_leaves_nothing(generating: Job) -> None:
    generating.kill_driver(signal.SIGKILL)
    assert generating.finish(60) == -signal.SIGKILL
    # Ray's agents too end by themselves: test_kill_and_resume waits for that.
    generating.assert_gone(but_agents=True)
