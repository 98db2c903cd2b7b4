"""Unknown keys lead to the key that was meant."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.config.keys import VERL_KEYS, KeyTable
from scalerl.config.schema import PPOConfig, SFTConfig

PPO, SFT = KeyTable(PPOConfig), KeyTable(SFTConfig)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trainer.total_epoch", "trainer.total_epochs"),
        ("data.train_file", "data.train_files"),
        ("ppo_mini_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor.optim.lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("actor_rollout_ref.rollout.tensor_parallel_size", "actor_rollout_ref.rollout.tensor_model_parallel_size"),
        ("trainer.n_gpus", "trainer.n_gpus_per_node"),
        ("algorithm.adv_estimater", "algorithm.adv_estimator"),
    ],
)
def test_nearest_key(wrong, right):
    assert PPO.kind(wrong) == "unknown"
    assert PPO.nearest(wrong) == right
    assert PPO.unknown(wrong) == f"{wrong}: no such key; did you mean {right}?"


@settings(max_examples=60)
@given(key=st.sampled_from(sorted(PPO.leaves)), data=st.data())
def test_a_key_with_one_letter_dropped_is_found_again(key, data):
    last = key.rsplit(".", 1)[-1]
    if len(last) < 5:
        return
    place = data.draw(st.integers(1, len(last) - 1))
    wrong = key[: len(key) - len(last)] + last[:place] + last[place + 1 :]
    # A dropped letter may make another key's name, or one that is as near.
    if PPO.kind(wrong) == "unknown":
        section = key.rpartition(".")[0]
        assert PPO.nearest(wrong).startswith(section)


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
        ("actor_rollout_ref.ref.log_prob_micro_batch_size", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"),
        ("critic.ppo_micro_batch_size_per_gpu", "critic.ppo_max_token_len_per_gpu"),
        ("actor_rollout_ref.actor.grad_clip", "actor_rollout_ref.actor.optim.clip_grad"),
        ("actor_rollout_ref.rollout.response_length", "data.max_response_length"),
        ("actor_rollout_ref.model.use_remove_padding", "remove it"),
        ("critic.enable", "algorithm.adv_estimator=gae"),
        ("reward.reward_manager.name", "reward_model.reward_manager"),
        ("hydra.run.dir", "trainer.default_local_dir"),
    ],
)
def test_keys_of_verl_lead_to_what_to_use_instead(key, advice):
    assert PPO.kind(key) == "unknown"
    assert advice in PPO.unknown(key)


@pytest.mark.parametrize("table", [PPO, SFT], ids=["ppo", "sft"])
def test_no_known_key_is_taken_for_one_of_verl(table):
    for key in table.leaves:
        assert not [pattern for pattern, _ in VERL_KEYS if re.search(pattern, key)], key


def test_kinds():
    assert PPO.kind("data.seed") == "leaf"
    assert PPO.kind("actor_rollout_ref.actor") == "section"
    assert PPO.kind("custom_reward_function.reward_kwargs.a.b") == "free"
    assert PPO.kind("data.seed.x") == "unknown"
    assert PPO.kind("dat") == "unknown"
