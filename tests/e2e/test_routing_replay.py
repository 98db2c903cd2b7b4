"""Whole runs of a mixture on SGLang whose updates follow the experts of the sampler."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from scalerl.extras.verify import replay
from tests.e2e.conftest import StartJob
from tests.e2e.jobs import PROMPTS, SAMPLES, Inputs, Record, Strike, main_ppo
from tests.e2e.kept import Kept
from tests.e2e.test_running_ahead import CORRECTED, OWN_POOL
from tests.e2e.test_verify import call
from tests.tiny_models import make_tiny_model

REPLAY = "algorithm.routing_replay=rollout"
STEPS, LAYERS, TOP_K, EXPERTS = 2, 3, 4, 32


@pytest.fixture(scope="module")
def mixture(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Many experts, four for each token: near ties between the fourth and the fifth are frequent."""
    sizes = {"num_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    path = make_tiny_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", **sizes)
    return Inputs(path, inputs.train, inputs.val)


def train(kept: Kept, mixture: Inputs, run_dir: Path, dtype: str, *more: str) -> dict[int, dict[str, float]]:
    arguments = mixture.overrides(
        run_dir,
        "data.max_prompt_length=64",
        "actor_rollout_ref.actor.max_tokens_per_micro_batch=160",
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
        f"actor_rollout_ref.actor.megatron.dtype={dtype}",
        "actor_rollout_ref.rollout.name=sglang",
        f"actor_rollout_ref.rollout.dtype={dtype}",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
        *more,
    )
    finished = kept.train(arguments)
    assert finished.code == 0, finished.tail()
    return Record.read(run_dir).final


def experts(run_dir: Path, step: int) -> list[NDArray[np.uint8]]:
    """[tokens, layers, k] of each sample that the step trained on."""
    table = pq.read_table(run_dir / "rollouts" / f"step_{step}.parquet", columns=["routed_experts"])
    return [np.array(row, np.uint8) for row in table["routed_experts"].to_pylist()]


@pytest.mark.shows("sync", family="qwen3_moe", layout="ep2", dtype="bfloat16")
@pytest.mark.shows("serve", family="qwen3_moe", layout="sglang", dtype="bfloat16")
@pytest.mark.full
def test_in_bfloat16_the_mismatch_falls(kept: Kept, mixture: Inputs, tmp_path: Path) -> None:
    """The two engines round differently, and choose other experts in near ties, unless the trainer follows."""
    free = train(kept, mixture, tmp_path / "free", "bfloat16")
    followed = train(kept, mixture, tmp_path / "followed", "bfloat16", REPLAY)
    for step in range(1, STEPS + 1):
        assert "actor/routing_agreement" not in free[step]
        assert 0.9 < followed[step]["actor/routing_agreement"] < 1.0
        # Seen: 3.9e-3 and 2.6e-3 without, 2.5e-4 and 2.3e-4 with it, where 5 % of the choices are others.
        assert followed[step]["rollout_corr/k3_kl"] < free[step]["rollout_corr/k3_kl"] / 3
        mean = "training/rollout_probs_diff_mean"
        assert followed[step][mean] < free[step][mean]
        for rows in experts(tmp_path / "followed", step):
            # Of all tokens but the last.
            assert rows.shape[1:] == (LAYERS, TOP_K) and (rows[-1] == 255).all() and (rows[:-1] < EXPERTS).all()
    # The step has what it was computed from.
    code, said = call(replay.main, [str(tmp_path / "followed"), "1"], kept)
    assert code == 0, said


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_in_float32_it_changes_nothing(kept: Kept, mixture: Inputs, tmp_path: Path, family: str) -> None:
    """One update, whose forward pass makes the old log-probs too; of the second family, whose first layer is dense, two
    ranks share the experts of a server and split each layer of the trainer."""
    own = ["trainer.total_training_steps=1", f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}"]
    if family == "deepseek_v3":
        path = make_tiny_model(tmp_path / family, family, num_layers=LAYERS, num_experts=8)
        mixture = Inputs(path, mixture.train, mixture.val)
        own += [
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "+actor_rollout_ref.rollout.engine_kwargs.sglang.ep_size=2",
        ]
    metrics = train(kept, mixture, tmp_path / "run", "float32", REPLAY, *own)[1]
    assert metrics["actor/routing_agreement"] == 1.0
    assert metrics["training/rollout_probs_diff_max"] < 1e-4


@pytest.mark.full
def test_rows_are_whole_over_pauses_and_a_lost_server(mixture: Inputs, start_job: StartJob, tmp_path: Path) -> None:
    """Requests are interrupted at each sync and continue under the next weights, and the server dies in step 2."""
    run_dir, policy, length = tmp_path / "run", "actor_rollout_ref", 96
    strikes = tmp_path / "strikes.json"
    strikes.write_text(json.dumps([Strike(2, 0, signal.SIGKILL).as_json(run_dir)]))
    overrides = mixture.overrides(
        run_dir,
        *OWN_POOL,
        CORRECTED,
        REPLAY,
        f"{policy}.rollout.name=sglang",
        f"{policy}.rollout.partial_rollout=true",
        # One group at a time: a batch takes longer than a step of the trainer.
        f"{policy}.rollout.max_num_seqs={SAMPLES}",
        f"{policy}.rollout.ignore_eos=true",
        f"{policy}.actor.max_tokens_per_micro_batch=512",
        "data.max_prompt_length=64",
        f"data.max_response_length={length}",
        "trainer.max_staleness=2",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=3",
        "trainer.val_before_train=false",
        f"+custom_reward_function.reward_kwargs.strikes_file={strikes}",
    )
    job = start_job(main_ppo(overrides), run_dir)
    assert job.finish() == 0, job.tail()
    record, num_mixed = Record.read(run_dir).final, 0
    assert sum(data["rollout/num_restarts"] for data in record.values()) == 1
    for step, data in record.items():
        assert 0.5 < data["actor/routing_agreement"] <= 1.0
        table = pq.read_table(run_dir / "rollouts" / f"step_{step}.parquet", columns=["policy_versions"])
        num_mixed += sum(len({*versions} - {-1}) > 1 for versions in table["policy_versions"].to_pylist())
        for rows in experts(run_dir, step):
            assert (rows[:-1] < EXPERTS).all() and (rows[-1] == 255).all()
    assert num_mixed > 0, "nothing ran while the weights changed"
