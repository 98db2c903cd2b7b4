"""Unknown keys lead to the key that was meant."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.config.keys import KeyTable
from scalerl.config.schema import PPOConfig

PPO = KeyTable(PPOConfig)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trainer.total_epoch", "trainer.total_epochs"),
        ("data.train_file", "data.train_files"),
        ("ppo_mini_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor.optim.lr", "actor_rollout_ref.actor.optim.lr"),
        ("lr", "actor_rollout_ref.actor.optim.lr"),
        ("optim.lr", "actor_rollout_ref.actor.optim.lr"),
        ("model.path", "actor_rollout_ref.model.path"),
        ("critic.tensor_model_parallel_size", "critic.megatron.tensor_model_parallel_size"),
        ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("actor_rollout_ref.rollout.tensor_parallel_size", "actor_rollout_ref.rollout.tensor_model_parallel_size"),
        ("trainer.n_gpus", "trainer.n_gpus_per_node"),
        ("algorithm.adv_estimater", "algorithm.adv_estimator"),
        ("actor_rollout_ref.actor.use_kl_los", "actor_rollout_ref.actor.use_kl_loss"),
        ("actor_rollout_ref.actor.ppo_mini_batchsize", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("actor_rollout_ref.actr.clip_ratio", "actor_rollout_ref.actor.clip_ratio"),
        ("trainer.node", "trainer.nnodes"),
    ],
)
def test_nearest_key(wrong, right):
    assert PPO.kind(wrong) == "unknown"
    assert PPO.nearest(wrong) == right
    assert PPO.unknown(wrong) == f"{wrong}: no such key; did you mean {right}?"


@pytest.mark.parametrize(
    "wrong",
    [
        "trainer.prioritise",
        "data.curriculum",
        "actor_rollout_ref.rollout.max_num_batched",
        "actor_rollout_ref.actor.megatron.use_fsdp",
        "async.total_steps",
        "temperatur",
        # Another word in the place of one makes another name.
        "actor_rollout_ref.actor.use_gpg_loss",
        "trainer.train_freq",
        # The name of a key in a deeper section, of several keys, or of the first words of several.
        "trainer.name",
        "algorithm.enable",
        "data.path",
        "actor_rollout_ref.rollout.path",
        "tensor_model_parallel_size",
        "path",
        "enable",
        "trainer.max",
    ],
)
def test_what_is_like_no_key_gets_no_guess(wrong):
    assert PPO.nearest(wrong) is None
    assert "did you mean" not in PPO.unknown(wrong)


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
        nearest = PPO.nearest(wrong)
        assert nearest is not None and nearest.rpartition(".")[0] == key.rpartition(".")[0]


def test_kinds():
    assert PPO.kind("data.seed") == "leaf"
    assert PPO.kind("actor_rollout_ref.actor") == "section"
    assert PPO.kind("custom_reward_function.reward_kwargs.a.b") == "free"
    assert PPO.kind("data.seed.x") == "unknown"
    assert PPO.kind("dat") == "unknown"
