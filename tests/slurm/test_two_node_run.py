"""`scalerl train` on two nodes of a real Slurm: the first step has the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.jobs import REWARD, Record
from tests.slurm.minislurm import MiniSlurm
from tests.slurm.test_ray_job import assert_nothing_left, submit  # noqa: F401
from tests.tiny_models import make_tiny_model

POLICY = "actor_rollout_ref"


def write_prompts(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{number}+1="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"split": "train", "index": number},
        }
        for number in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def arguments(directory: Path, nnodes: int) -> list[str]:
    """One process on each node."""
    prompts = directory / "prompts.parquet"
    return [
        "scalerl",
        "train",
        "+recipe=[grpo,cpu]",
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        "data.train_batch_size=4",
        f"{POLICY}.model.path={directory / 'model'}",
        f"{POLICY}.actor.ppo_mini_batch_size=2",
        f"{POLICY}.actor.ppo_max_token_len_per_gpu=160",
        f"{POLICY}.rollout.name=embedded",
        f"{POLICY}.rollout.num_replicas=null",
        f"{POLICY}.rollout.n=2",
        f"custom_reward_function.path={REWARD}",
        "trainer.n_gpus_per_node=1",
        f"trainer.nnodes={nnodes}",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={directory / f'run_{nnodes}'}",
    ]


@pytest.mark.full
def test_the_numbers_of_one_process(slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path) -> None:  # noqa: F811
    make_tiny_model(tmp_path / "model", "qwen3", num_layers=2)
    write_prompts(tmp_path / "prompts.parquet")
    metrics = {}
    for nnodes in (1, 2):
        job_id = submit(nnodes, *arguments(tmp_path, nnodes))
        job = slurm.wait(job_id, timeout_s=400)
        assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), (tmp_path / f"out-{job_id}.txt").read_text()
        metrics[nnodes] = Record.read(tmp_path / f"run_{nnodes}").final[1]
        logs = sorted(path.name for path in (tmp_path / f"run_{nnodes}" / "logs").glob("rollout-*.log"))
        assert logs == [f"rollout-{index}.log" for index in range(nnodes)]
        assert_nothing_left(slurm)
    same = ("actor/", "critic/", "response", "prompt_length")
    wanted = {key: value for key, value in metrics[1].items() if key.startswith(same)}
    assert wanted["actor/grad_norm"] > 0
    assert {key: metrics[2][key] for key in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert metrics[2]["training/rollout_probs_diff_max"] < 1e-4
