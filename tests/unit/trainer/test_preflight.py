"""What model, data and configuration must have to do with each other before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl.config import ConfigError, PPOConfig, compose
from scalerl.trainer.model_checks import actor_violations, read_model
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
    for family in ("qwen3", "qwen3_moe", "mixtral", "deepseek_v3"):
        make_tiny_model(directory / family, family)
    make_tiny_model(directory / "with_dense_layers", "qwen3_moe", mlp_only_layers=[1])
    return directory


def rows_of(path: Path, *styles: str) -> list[str]:
    """-> overrides for a file with a row of each of these styles."""
    rows = [ROW | {"reward_model": {"style": style, "ground_truth": "2"}} for style in styles]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return [f"data.train_files={path}", f"data.val_files={path}"]


def config(directory: Path, family: str, rollout: str, verify_weights_every: int, *more: str) -> PPOConfig:
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
            *more,
        ],
    )


def violation(directory: Path, *arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_ppo(config(directory, *arguments))
    (found,) = caught.value.violations
    return found


def test_checksums_of_sglang_are_refused_where_they_are_not_known(directory: Path) -> None:
    found = violation(directory, "deepseek_v3", "sglang", 1)
    assert found.startswith(f"{VERIFY} = 1: ") and "not known for a deepseek_v3 model" in found
    found = violation(directory, "qwen3_moe", "sglang", 2, "+actor_rollout_ref.rollout.engine_kwargs.sglang.ep_size=1")
    assert found.startswith(f"{VERIFY} = 2: ") and "engine_kwargs.sglang.ep_size" in found


def test_dense_layers_that_sglang_would_not_see_are_refused(directory: Path) -> None:
    found = violation(directory, "with_dense_layers", "sglang", 0)
    assert found.startswith("actor_rollout_ref.rollout.name = sglang: ") and "in layers 1 (mlp_only_layers" in found
    assert check_ppo(config(directory, "with_dense_layers", "embedded", 1)) is not None


def test_checksums_of_a_mixture_on_a_gpu_are_refused(directory: Path) -> None:
    cfg = config(directory, "mixtral", "sglang", 1)
    cfg.trainer.device = "cuda"
    (found,) = [one for one in actor_violations(cfg, read_model(str(directory / "mixtral"))) if VERIFY in one]
    assert "on a GPU are not known for a mixture of experts (mixtral); set it to 0" in found


@pytest.mark.parametrize(
    ("family", "rollout", "verify_weights_every"),
    [
        ("deepseek_v3", "sglang", 0),
        ("deepseek_v3", "embedded", 1),
        ("qwen3", "sglang", 1),
        ("qwen3_moe", "sglang", 1),
        ("mixtral", "sglang", 1),
    ],
)
def test_other_models_and_engines_may_be_verified(
    directory: Path, family: str, rollout: str, verify_weights_every: int
) -> None:
    assert check_ppo(config(directory, family, rollout, verify_weights_every)) is not None


def test_a_judge_that_cannot_judge_is_refused(directory: Path, tmp_path: Path) -> None:
    judge, question = "reward_model.judge", tmp_path / "question.txt"
    question.write_text("How good is it?")
    on = [
        f"{judge}.enable=true",
        f"{judge}.model.path={directory / 'qwen3'}",
        f"{judge}.max_prompt_length=1000",
        f"{judge}.resource_pool.nnodes=1",
        *rows_of(tmp_path / "rows.parquet", "rule", "judge", "rule", "judge"),
    ]
    assert check_ppo(config(directory, "qwen3", "embedded", 0, *on)) is not None
    with pytest.raises(ConfigError) as caught:
        check_ppo(
            config(
                directory,
                "qwen3",
                "embedded",
                0,
                *on,
                f"{judge}.prompt_path={question}",
                f"{judge}.max_prompt_length=3000",
            )
        )
    no_response, too_long = caught.value.violations
    assert no_response.startswith(f"{judge}.prompt_path = {question}: does not hold {{response}}")
    assert too_long.startswith(f"{judge}.max_prompt_length + {judge}.max_response_length = 4024 tokens exceed")
    with pytest.raises(ConfigError) as caught:
        check_ppo(config(directory, "qwen3", "embedded", 0, *on, f"{judge}.model.path={tmp_path}"))
    assert caught.value.violations[0].startswith(f"{judge}.model.path = {tmp_path}: has no config.json")
    assert "holds no tokenizer" in caught.value.violations[1] and len(caught.value.violations) == 2


def test_a_judge_or_reward_model_without_a_prompt_to_score_is_refused(directory: Path, tmp_path: Path) -> None:
    judge, model = "reward_model.judge", "reward_model"
    on = [f"{judge}.enable=true", f"{judge}.model.path={directory / 'qwen3'}", f"{judge}.resource_pool.nnodes=1"]
    found = violation(directory, "qwen3", "embedded", 0, *on, f"{judge}.max_prompt_length=1000")
    assert found.startswith(f"{judge}.enable = true: no prompt of data.train_files and data.val_files has reward_model")
    assert "'judge'" in found and "(their styles: rule)" in found
    on = [f"{model}.enable=true", f"{model}.model.path={directory / 'qwen3'}"]
    rows = rows_of(tmp_path / "rows.parquet", "rule", "judge", "other", "rule")
    with pytest.raises(ConfigError) as caught:
        check_ppo(config(directory, "qwen3", "embedded", 0, *on, *rows))
    (found,) = [one for one in caught.value.violations if one.startswith(f"{model}.enable = true")]
    assert "'model'" in found and "(their styles: judge, other, rule)" in found
