"""Runs that see images: each step's log-probs are those of the sampler, and the example learns what it must look at."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.conftest import StartJob
from tests.e2e.jobs import Record
from tests.e2e.kept import Kept
from tests.pictures import content, noise, write_processor
from tests.tiny_vision import make_tiny_vision_model

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "vision"
# The arguments of verl's script for geo3k, one a line.
GEO3K = ROOT / "tests/unit/extras/verl/commands/geo3k_qwen2_5_vl_7b.txt"
TIMEOUT_S = 1800
STEPS = 3
TWO_CORES = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="SGLang on CPU binds each rank to a core of its own"
)


Run = Callable[..., dict[int, dict[str, float]]]


@pytest.fixture
def run(kept: Kept, start_job: StartJob, tmp_path: Path) -> Run:
    """(family, name, overrides) -> metrics of each step of a run in tmp_path / name.

    It has rows with images, with several and without any in a step. The tower trains, and every sync is verified.
    """

    def run(family: str, name: str, *overrides: str) -> dict[int, dict[str, float]]:
        if not (tmp_path / "made").exists():
            make_inputs(start_job, tmp_path, family)
        finished = kept.train([*arguments_of(tmp_path, tmp_path / name), *overrides])
        assert finished.code == 0, finished.tail()
        return Record.read(tmp_path / name).final

    return run


def make_inputs(start_job: StartJob, path: Path, family: str) -> None:
    scripts = [("make_data.py", []), ("make_model.py", ["--model", family])]
    if family == "qwen3_vl_moe":
        # The example has none. SGLang feeds three layers.
        model = make_tiny_vision_model(path / "made", family, depth=3, deepstack_visual_indexes=[0, 1, 2])
        write_processor(model, family)
        del scripts[1]
    for script, more in scripts:
        job = start_job([sys.executable, str(EXAMPLE / script), "--out", "made", *more], path)
        assert job.process.wait(TIMEOUT_S) == 0, job.stderr
    rows = pq.read_table(path / "made" / "rl_train.parquet").slice(0, 48).to_pylist()
    for row in rows[::3]:
        row["images"], row["prompt"] = None, [{"role": "user", "content": "Which color?"}]
    for row, other in zip(rows[1::3], rows[2::3], strict=True):
        row["images"] = row["images"] + other["images"]
        row["prompt"] = [{"role": "user", "content": "<image>Which<image> shape?"}]
    pq.write_table(pa.Table.from_pylist(rows), path / "mixed.parquet")
    # An untrained model is seldom right. The function gets the images of the row.
    (path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': len(solution_str) / 10, 'images': len(extra_info['images'])}\n"
    )


def arguments_of(path: Path, run_dir: Path) -> list[str]:
    arguments = ["--config-dir", str(EXAMPLE), "--config-name", "grpo", "data.train_batch_size=12"]
    arguments.append("data.max_prompt_length=128")
    arguments += [f"data.{name}_files={path / 'mixed.parquet'}" for name in ("train", "val")]
    arguments += [f"actor_rollout_ref.model.path={path / 'made'}", f"trainer.default_local_dir={run_dir}"]
    arguments += [f"custom_reward_function.path={path / 'reward.py'}", "custom_reward_function.with_images=true"]
    arguments += ["actor_rollout_ref.actor.ppo_mini_batch_size=6", "actor_rollout_ref.actor.optim.lr=1e-2"]
    arguments += ["actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.verify_weights_every=1"]
    return [*arguments, f"trainer.total_training_steps={STEPS}", "trainer.test_freq=1", "trainer.n_gpus_per_node=2"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "tp_size"),
    [
        ("qwen2_5_vl", 1),
        ("qwen3_vl", 1),
        ("qwen3_vl_moe", 1),
        ("qwen3_5", 1),
        pytest.param("qwen3_vl", 2, marks=TWO_CORES),
    ],
)
def test_trainer_and_servers_see_the_same(run: Run, tmp_path: Path, family: str, tp_size: int) -> None:
    """tp_size: ranks of the server."""
    steps = run(family, "run", f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp_size}")
    for step in range(1, STEPS + 1):
        assert steps[step]["training/rollout_probs_diff_max"] < 1e-5
        assert steps[step]["actor/grad_norm"] > 0
    table = json.loads((tmp_path / "run" / "tables" / "val" / "generations" / f"step_{STEPS}.json").read_text())
    images = [table["columns"].index(f"image/{number}") for number in (0, 1)]
    assert [[row[place] for place in images] for row in table["data"][:3]] == [
        ["", ""],
        ["<image>"] * 2,
        ["<image>", ""],
    ]


@pytest.mark.full
def test_a_critic_has_the_numbers_of_one_rank(run: Run) -> None:
    """On the likeliest words: those that SGLang draws are others in each run."""
    gae = ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "trainer.total_training_steps=1"]
    gae.append("actor_rollout_ref.rollout.top_k=1")
    two = run("qwen3_vl", "two", *gae)[1]
    one = run("qwen3_vl", "one", *gae, "trainer.n_gpus_per_node=1")[1]
    names = [name for name in one if name.startswith(("actor/", "critic/", "training/rollout_"))]
    assert one["critic/grad_norm"] > 0 and one["critic/score/max"] > one["critic/score/min"]
    assert {name: two[name] for name in names} == pytest.approx({name: one[name] for name in names}, rel=1e-5, abs=1e-6)


@pytest.mark.full
def test_the_example_learns_what_nobody_knows_who_does_not_look(start_job: StartJob, tmp_path: Path) -> None:
    """Its exit code says that transformers scored the merged model as the trainer's last validation did."""
    job = start_job([sys.executable, str(EXAMPLE / "quickstart.py"), "--out", str(tmp_path / "out")], tmp_path)
    assert job.finish(TIMEOUT_S) == 0, job.tail()
    after_sft, after_rl = re.findall(r"after SFT ([\d.]+)\s+after RL ([\d.]+)", job.stdout)
    (seen_before, seen), (_, blank) = (tuple(map(float, scores)) for scores in (after_sft, after_rl))
    assert seen > max(seen_before, 0.75) and blank < 0.5, job.tail()


def test_a_launch_script_of_verl_may_start(kept: Kept, tmp_path: Path) -> None:
    """As it is, but for the places of model and data, the devices, its tracker, and the tiny model's positions."""
    model = make_tiny_vision_model(tmp_path / "model", "qwen2_5_vl")
    write_processor(model, "qwen2_5_vl")
    row = {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": "<image>Find x."}],
        "images": [{"bytes": content(noise(1, 84, 56)), "path": None}],
        "ability": "math",
        "reward_model": {"ground_truth": "3", "style": "rule"},
        "extra_info": {"split": "train", "index": 0, "answer": "3", "question": "Find x."},
    }
    pq.write_table(pa.Table.from_pylist([row] * 512), tmp_path / "geo3k.parquet")
    arguments = GEO3K.read_text(encoding="utf-8").splitlines()
    arguments += [f"data.{name}_files={tmp_path / 'geo3k.parquet'}" for name in ("train", "val")]
    arguments += [f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={tmp_path / 'run'}"]
    arguments += ["data.max_response_length=1024", "trainer.logger=[console]", "trainer.device=cpu"]
    finished = kept.train([*arguments, "--dry-run"])
    assert finished.code == 0, finished.tail()
    assert "actor_rollout_ref.model.freeze_vision_tower=true" in finished.stdout
