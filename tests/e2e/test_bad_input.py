"""What a person gets wrong ends in one clear message and a non-zero exit.

Everything that can be known before a device is held is reported at once, so one process serves several cases.
Checkpoints that are half written or another model's: test_kill_and_resume, which has checkpoints.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from scalerl.base.directory_lock import directory_lock
from scalerl.errors import EXIT_FAILED
from scalerl.rewards.trial import TRIAL_RESPONSE
from tests.e2e.conftest import StartJob
from tests.e2e.jobs import Inputs, numbered, only, refused, scalerl
from tests.e2e.kept import Kept
from tests.lanes import full

ACTOR = "actor_rollout_ref.actor"
TP = f"{ACTOR}.megatron.tensor_model_parallel_size"
PP = f"{ACTOR}.megatron.pipeline_model_parallel_size"
# One process as trainer, to start soon.
ONE_RANK = ("trainer.n_gpus_per_node=1", "trainer.total_training_steps=1")


def row(**changes: object) -> dict:
    """A good row of the five columns, with changes; a column set to `...` is left out."""
    good = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "12+3="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "15"},
        "extra_info": {"split": "train", "index": 0},
    }
    return {key: value for key, value in (good | changes).items() if value is not ...}


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def copy_model(inputs: Inputs, target: Path, *, without: str) -> Path:
    shutil.copytree(inputs.model, target)
    (target / without).unlink()
    return target


# Nothing is read yet: the configuration by itself.


def test_unknown_key_names_the_nearest(inputs: Inputs, start_job: StartJob, tmp_path: Path) -> None:
    overrides = inputs.overrides(tmp_path / "run", f"{ACTOR}.ppo_mini_batchsize=4", "data.shufle=false")
    violations = numbered(refused(start_job(scalerl("train", *overrides), tmp_path)))
    only(violations, f"{ACTOR}.ppo_mini_batchsize: no such key", f"did you mean {ACTOR}.ppo_mini_batch_size?")
    only(violations, "data.shufle: no such key", "did you mean data.shuffle?")


def test_sizes_that_do_not_divide_name_the_nearest(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    """World size by the layout, and the step's batch by its mini-batches."""
    overrides = inputs.overrides(
        tmp_path / "run",
        "trainer.n_gpus_per_node=6",
        f"{TP}=2",
        f"{PP}=2",
        "data.train_batch_size=10",
        f"{ACTOR}.ppo_mini_batch_size=4",
    )
    violations = numbered(refused(kept.train(overrides)))
    only(violations, "trainer.n_gpus_per_node = 1 x 6 = 6", f"{TP} x {PP} = 4", "trainer.n_gpus_per_node=4 or 8")
    only(
        violations,
        f"{ACTOR}.ppo_mini_batch_size = 4: must divide data.train_batch_size = 10",
        "ppo_mini_batch_size=2 or 5",
        "data.train_batch_size=8 or 12",
    )
    assert not (tmp_path / "run").exists()


# Files, before a device is held.


def test_all_that_is_wrong_with_the_files_is_told_at_once(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    directory = tmp_path / "files"
    write(directory / "lacks.parquet", [row(reward_model=...)])
    write(directory / "types.parquet", [row(), row(prompt=[])])
    model = copy_model(inputs, directory / "lacks_tensor", without="model.safetensors")
    tensors = load_file(inputs.model / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    overrides = inputs.overrides(
        directory / "run",
        f"data.train_files={directory / 'lacks.parquet'}",
        f"data.val_files={directory / 'types.parquet'}",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.ref.model_path={copy_model(inputs, directory / 'lacks_config', without='config.json')}",
        "custom_reward_function.path=no/such/reward.py",
    )
    violations = numbered(refused(kept.train(overrides)))
    only(violations, "lacks.parquet", "reward_model")
    only(violations, "types.parquet", "row 1", "column 'prompt'", "empty")
    only(violations, "lacks_tensor", "missing model.layers.0.mlp.up_proj.weight")
    only(violations, "lacks_config has no config.json")
    only(violations, "custom_reward_function.path=no/such/reward.py does not exist")


def test_all_that_does_not_fit_together_is_told_at_once(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    directory = tmp_path / "fit"
    write(directory / "long.parquet", [row(), row(prompt=[{"role": "user", "content": "1" * 50}])])
    write(directory / "types.parquet", [row(ability=7)])
    reward = directory / "reward.py"
    reward.write_text("def compute_scores(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n")
    ref = copy_model(inputs, directory / "lacks_weights", without="model.safetensors")
    heads, layers = inputs.config["num_attention_heads"], inputs.config["num_hidden_layers"]
    overrides = inputs.overrides(
        directory / "run",
        f"data.train_files={directory / 'long.parquet'}",
        f"data.val_files={directory / 'types.parquet'}",
        f"actor_rollout_ref.ref.model_path={ref}",
        f"custom_reward_function.path={reward}",
        # One more than there are divides neither.
        f"{TP}={heads + 1}",
        f"{PP}={layers + 1}",
        f"trainer.n_gpus_per_node={(heads + 1) * (layers + 1)}",
    )
    violations = numbered(refused(kept.train(overrides)))
    only(violations, "long.parquet", "row 1", "column 'prompt'", "max_prompt_length=16", " tokens)")
    only(violations, "types.parquet", "row 0", "column 'ability'", "found int, not text (7)")
    only(violations, "lacks_weights has neither model.safetensors nor")
    only(violations, "reward.py does not define 'compute_score'", "custom_reward_function.name=compute_scores")
    only(violations, f"{TP} = {heads + 1}: must divide the model's {heads} attention heads")
    only(violations, f"{PP} = {layers + 1}: must divide the model's {layers} layers")


@pytest.mark.parametrize("choice", ["data.truncation=middle", full("data.filter_overlong_prompts=true")])
def test_long_prompts_are_cut_or_filtered_with_a_count(
    choice: str, inputs: Inputs, start_job: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run imports nothing that only a run needs: it would take half as long again."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    long = [{"role": "user", "content": "1" * 50}]
    train = write(tmp_path / "train.parquet", [row(), row(prompt=long), row(), row(prompt=long), row(), row()])
    overrides = inputs.overrides(tmp_path / "run", f"data.train_files={train}", choice, "--dry-run")
    job = start_job(scalerl("train", *overrides), tmp_path)
    assert job.finish(120) == 0, job.tail()
    filtered = "2 of 6 prompts dropped: longer than data.max_prompt_length=16 tokens" in job.stderr
    assert filtered is (choice != "data.truncation=middle")
    prompts = 4 if filtered else 6
    assert re.search(rf"steps per epoch +{prompts} / 4 = ", job.stdout)
    imported = {line.rpartition("|")[2].strip() for line in job.stderr.splitlines() if line.startswith("import time:")}
    assert {"torch", "transformers"} <= imported
    assert not imported & {"torch._dynamo", "torch.distributed.checkpoint", "sympy", "sklearn", "megatron.core"}


# What shows only while the job runs.


@pytest.mark.full
def test_reward_function_that_fails(inputs: Inputs, start_job: StartJob, tmp_path: Path) -> None:
    """On what the policy writes; one that fails on every response is found before anything starts."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    return 0.0 if solution_str == {TRIAL_RESPONSE!r} else {{}}['answer']\n"
    )
    overrides = inputs.overrides(tmp_path / "run", *ONE_RANK, f"custom_reward_function.path={reward}")
    job = start_job(scalerl("train", *overrides), tmp_path)
    message = refused(job, 300)
    for part in (
        f"compute_score of {reward}",
        "val prompt ",
        " sample 0",
        "KeyError: 'answer'",
        f"data_source: {inputs.data_source!r}",
    ):
        assert part in message
    assert "ground_truth: '" in message and "response: '" in message and "reward_model.on_error=zero" in message
    job.assert_gone()


@pytest.mark.full
def test_sglang_server_that_dies_at_start(inputs: Inputs, start_job: StartJob, tmp_path: Path) -> None:
    overrides = inputs.overrides(
        tmp_path / "run",
        *ONE_RANK,
        "actor_rollout_ref.rollout.name=sglang",
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=nonsense",
    )
    job = start_job(scalerl("train", *overrides), tmp_path)
    message = refused(job, 300)
    log = tmp_path / "run" / "logs" / "rollout-0.log"
    assert "ended with exit code 2 before it was ready" in message and str(log) in message
    last = log.read_text().rstrip().splitlines()[-1]
    assert "nonsense" in last and f"  | {last}" in message
    assert "--attention-backend nonsense" in message.splitlines()[-1], "the command to try by hand"
    job.assert_gone()


@pytest.mark.full
def test_a_server_that_comes_up_late_is_no_mistake(inputs: Inputs, start_job: StartJob, tmp_path: Path) -> None:
    """Slurm starts the job again, on a quieter machine perhaps."""
    late = "actor_rollout_ref.rollout.start_timeout_s"
    job = start_job(scalerl("train", *inputs.overrides(tmp_path / "run", *ONE_RANK, f"{late}=0.1")), tmp_path)
    assert job.finish(300) == EXIT_FAILED, job.tail()
    assert f"was not ready after 0 s; raise {late}" in job.stderr and "Traceback" not in job.stderr
    job.assert_gone()


def test_a_directory_that_another_run_writes(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with directory_lock(run_dir, "the test's"):
        message = refused(kept.train(inputs.overrides(run_dir, *ONE_RANK)))
    assert f"trainer.default_local_dir = {run_dir}: another run is writing there" in message
    assert f"process {os.getpid()}," in message
    assert [path.name for path in run_dir.iterdir()] == ["lock"]
