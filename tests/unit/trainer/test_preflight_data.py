"""What is wrong with a dataset class or a URL is found with everything else, before a device is held."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl.config import ConfigError, PPOConfig, compose
from scalerl.data import PromptTable
from scalerl.trainer.checks.preflight import check_ppo
from tests.tiny_models import make_tiny_model

ROW = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "1+1="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0},
}
OWN = "from scalerl.data import RLHFDataset\nclass Own(RLHFDataset):\n    def __len__(self): return 3\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    pq.write_table(pa.Table.from_pylist([ROW] * 4), directory / "rows.parquet")
    (directory / "own.py").write_text(OWN)
    (directory / "reward.py").write_text("def compute_score(**_):\n    return 0.0\n")
    make_tiny_model(directory / "model", "qwen3")
    return directory


def config(directory: Path, *overrides: str) -> PPOConfig:
    return compose(
        "ppo",
        [
            f"data.train_files=file://{directory}/rows.parquet",
            f"data.val_files={directory}/rows.parquet",
            f"data.cache_dir={directory}/cache",
            "data.max_prompt_length=64",
            "data.max_response_length=8",
            "data.train_batch_size=2",
            f"actor_rollout_ref.model.path={directory}/model",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.megatron.dtype=float32",
            "actor_rollout_ref.rollout.n=2",
            f"custom_reward_function.path={directory}/reward.py",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=1",
            f"trainer.default_local_dir={directory}/run",
            *overrides,
        ],
    )


def test_a_class_of_the_users_file_gives_the_rows(directory: Path) -> None:
    inputs = check_ppo(config(directory, f"data.custom_cls.path={directory}/own.py", "data.custom_cls.name=Own"))
    assert isinstance(inputs.train, PromptTable) and (len(inputs.train), len(inputs.val)) == (3, 3)
    assert len(list((directory / "cache").rglob("rows.parquet"))) == 1


def test_a_class_that_is_not_there_and_another_mistake_come_together(directory: Path) -> None:
    cfg = config(
        directory,
        f"data.custom_cls.path={directory}/own.py",
        "data.custom_cls.name=Owl",
        f"custom_reward_function.path={directory}/no.py",
    )
    with pytest.raises(ConfigError) as caught:
        check_ppo(cfg)
    text = "\n".join(caught.value.violations)
    assert "does not define the class 'Owl'" in text and "set data.custom_cls.name=Own" in text
    assert "no.py does not exist" in text and len(caught.value.violations) == 2


def test_a_url_that_is_not_there_is_named(directory: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_ppo(config(directory, f"data.train_files=file://{directory}/no.parquet"))
    (violation,) = caught.value.violations
    assert violation.startswith(f"file://{directory}/no.parquet: does not exist (")
