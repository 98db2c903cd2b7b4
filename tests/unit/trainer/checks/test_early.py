"""Names, files, models and own code are looked up in the first round, whatever else is wrong with the configuration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scalerl.base.user_code import forget_files
from scalerl.config import ConfigError
from scalerl.trainer.checks.early import composed_run


def problems(kind: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        composed_run(kind, overrides)  # pyright: ignore[reportArgumentType]
    return caught.value.violations


def test_all_that_can_be_looked_up_comes_with_a_key_that_does_not_exist(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    messages = problems(
        "ppo",
        "trainer.nosuch=1",
        "trainer.nnodes=0",
        "algorithm.adv_estimator=grop",
        f"data.train_files={tmp_path / 'no.parquet'}",
        f"actor_rollout_ref.model.path={tmp_path / 'no_model'}",
        f"custom_reward_function.path={tmp_path / 'no_reward.py'}",
        f"trainer.default_local_dir={taken}",
        "actor_rollout_ref.actor.megatron.override_transformer_config.nosuch_field=1",
    )
    patterns = [
        "trainer.nosuch: ",
        "data.val_files: missing; set",
        "trainer.nnodes = 0: ",
        "algorithm.adv_estimator='grop': .* Did you mean 'grpo'",
        f"custom_reward_function.path={tmp_path}/no_reward.py does not exist",
        f"actor_rollout_ref.model.path = {tmp_path}/no_model: there is no such directory",
        f".*{tmp_path}/no.parquet does not exist",
        ".*nosuch_field",
        f"trainer.default_local_dir = {taken}: it or a part of its path is a file",
    ]
    assert len(messages) == len(patterns), messages
    for text, pattern in zip(messages, patterns, strict=True):
        assert re.match(pattern, text, re.DOTALL), (pattern, text)


def test_names_that_files_of_the_users_own_register_are_known_then(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from scalerl.rewards import NaiveRewardManager, register_reward_manager\n\n\n"
        "@register_reward_manager('mine')\nclass Mine(NaiveRewardManager):\n    pass\n"
    )
    keys = ("trainer.nosuch=1", f"trainer.import_files=[{own}]", f"data.train_files={own}.parquet")
    forget_files()
    try:
        messages = problems("ppo", *keys, "reward_model.reward_manager=mine", "algorithm.adv_estimator=grop")
    finally:
        forget_files()
    assert not any("reward_manager" in text for text in messages)
    assert sum("grop" in text for text in messages) == 1 and sum("own.py.parquet" in text for text in messages) == 1


def test_what_is_not_set_or_may_be_fetched_is_not_looked_for(tmp_path: Path) -> None:
    """A model on the hub and data behind a URL wait for a configuration without mistakes."""
    messages = problems(
        "sft", "trainer.nosuch=1", "model.path=Qwen/Qwen3-0.6B", "data.train_files=s3://bucket/a.parquet"
    )
    assert len(messages) == 1 and messages[0].startswith("trainer.nosuch")
    missing = problems("sft", "trainer.nosuch=1")
    assert [text.split(":")[0] for text in missing] == ["trainer.nosuch", "data.train_files", "model.path"]
