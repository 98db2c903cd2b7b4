"""What model, data and configuration must have to do with each other before anything starts."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl.config import ConfigError, PPOConfig, compose
from scalerl.trainer.preflight import check_ppo
from tests.tiny_models import make_tiny_model

ROW = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "1+1="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0},
}
VERIFY = "actor_rollout_ref.rollout.verify_weights_every"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    pq.write_table(pa.Table.from_pylist([ROW] * 4), directory / "rows.parquet")
    (directory / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
    )
    for family in ("qwen3", "qwen3_moe"):
        make_tiny_model(directory / family, family)
    return directory


def config(directory: Path, family: str, rollout: str, verify_weights_every: int) -> PPOConfig:
    rollout_keys = "actor_rollout_ref.rollout"
    return compose(
        "ppo",
        [
            f"data.train_files={directory / 'rows.parquet'}",
            f"data.val_files={directory / 'rows.parquet'}",
            "data.max_prompt_length=64",
            "data.max_response_length=8",
            "data.train_batch_size=4",
            f"actor_rollout_ref.model.path={directory / family}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.megatron.dtype=float32",
            f"{rollout_keys}.name={rollout}",
            f"{rollout_keys}.n=2",
            f"{VERIFY}={verify_weights_every}",
            f"custom_reward_function.path={directory / 'reward.py'}",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=1",
            f"trainer.default_local_dir={directory / 'run'}",
        ],
    )


def test_checksums_of_sglang_are_refused_for_a_mixture_of_experts(directory: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_ppo(config(directory, "qwen3_moe", "sglang", 1))
    (violation,) = caught.value.violations
    assert violation.startswith(f"{VERIFY} = 1: ") and "(qwen3_moe); set it to 0" in violation


@pytest.mark.parametrize(
    ("family", "rollout", "verify_weights_every"),
    [("qwen3_moe", "sglang", 0), ("qwen3_moe", "embedded", 1), ("qwen3", "sglang", 1)],
)
def test_other_models_and_engines_may_be_verified(
    directory: Path, family: str, rollout: str, verify_weights_every: int
) -> None:
    assert check_ppo(config(directory, family, rollout, verify_weights_every)) is not None
