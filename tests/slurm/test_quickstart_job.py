"""The quickstart's reinforcement learning as a Slurm job of two nodes with two devices each: it learns there too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scalerl.merge import merge
from tests.e2e.conftest import EXAMPLE
from tests.e2e.jobs import Record, scalerl
from tests.slurm.jobs import Launch, assert_nothing_left, launched_job
from tests.slurm.minislurm import MiniSlurm

STEPS = 10
SCORE = "val-core/arithmetic/add/reward/mean@1"


def warm_start(directory: Path) -> Path:
    """Makes the quickstart's data and model and fine-tunes it as the quickstart does; returns the model's directory."""
    sft = [
        f"data.train_files={directory / 'sft_train.parquet'}",
        f"model.path={directory / 'model'}",
        f"trainer.default_local_dir={directory / 'sft'}",
    ]
    commands = [
        [sys.executable, str(EXAMPLE / "make_data.py"), "--out", str(directory)],
        [sys.executable, str(EXAMPLE / "make_model.py"), "--out", str(directory / "model")],
        scalerl("sft", "--config-dir", str(EXAMPLE), "--config-name", "sft", *sft),
    ]
    for command in commands:
        subprocess.run(command, check=True, cwd=directory, stdout=subprocess.DEVNULL, timeout=600)
    step = (directory / "sft/latest_checkpointed_iteration.txt").read_text().strip()
    actor, target = directory / f"sft/global_step_{step}/actor", directory / "sft_model"
    merge(actor, target)
    return target


@pytest.mark.full
def test_it_learns_on_two_nodes_of_two_devices(slurm: MiniSlurm, launch: Launch, tmp_path: Path) -> None:
    """Real SGLang servers, one on each device."""
    run_dir, model = tmp_path / "run", warm_start(tmp_path)
    done = launch(
        "slurm",
        "--config-dir", str(EXAMPLE),
        "--config-name", "grpo",
        f"data.train_files={tmp_path / 'rl_train.parquet'}",
        f"data.val_files={tmp_path / 'rl_val.parquet'}",
        f"custom_reward_function.path={EXAMPLE / 'reward.py'}",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.num_replicas=null",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        f"trainer.default_local_dir={run_dir}",
    )  # fmt: skip
    job_id = launched_job(done)
    job = slurm.wait(job_id, timeout_s=900)
    out = (run_dir / f"logs/slurm-{job_id}.out").read_text()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), out
    metrics = Record.read(run_dir).final
    assert metrics[STEPS][SCORE] >= metrics[0][SCORE] + 0.1
    for step in range(1, STEPS + 1):
        assert metrics[step]["training/rollout_probs_diff_max"] < 1e-4
    assert (run_dir / f"global_step_{STEPS}").is_dir()
    assert_nothing_left(slurm)
