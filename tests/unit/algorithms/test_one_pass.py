"""When the update of a step makes the old log-probs too: the rule, case by case."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest

from scalerl.algorithms import advantages, register_adv_est
from scalerl.algorithms.one_pass import is_one_pass_enough
from scalerl.config import PPOConfig

ACTOR = "actor_rollout_ref.actor"
ESTIMATOR, LOSS = "algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"
CORRECTION, OVERRIDES = "algorithm.rollout_correction", f"{ACTOR}.megatron.override_transformer_config"

ENOUGH: list[Mapping[str, Any]] = [
    {},
    *({ESTIMATOR: name} for name in ("gae", "rloo", "opo", "remax", "reinforce_plus_plus")),
    *({LOSS: name} for name in ("gspo", "cispo", "geo_mean", "sapo", "gpg", "dro")),
    {f"{ACTOR}.use_kl_loss": True},
    {f"{ACTOR}.entropy_coeff": 0.01},
    {f"{ACTOR}.megatron.recompute_granularity": "full"},
    {OVERRIDES: {"hidden_dropout": 0.0, "moe_router_load_balancing_type": "aux_loss"}},
    {"critic.ppo_epochs": 2, ESTIMATOR: "gae"},
    {"trainer.critic_warmup": 1},
]
NOT_ENOUGH: list[Mapping[str, Any]] = [
    {f"{ACTOR}.ppo_mini_batch_size": 4},
    {f"{ACTOR}.ppo_epochs": 2},
    {f"{CORRECTION}.rollout_is": "token"},
    {f"{CORRECTION}.rollout_rs": "token_k1"},
    {f"{CORRECTION}.rollout_token_veto_threshold": 0.1},
    {f"{CORRECTION}.bypass_mode": True},
    {"algorithm.use_kl_in_reward": True},
    *({LOSS: name} for name in ("clip_cov", "kl_cov")),
    *({OVERRIDES: {name: 0.1}} for name in ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")),
    {OVERRIDES: {"moe_router_load_balancing_type": "sinkhorn"}},
    # No update in step 2.
    {"trainer.critic_warmup": 2},
]


def config(values: Mapping[str, Any]) -> PPOConfig:
    cfg = PPOConfig()
    # Defaults that follow from other keys are those of a composed configuration.
    given = {"data.train_batch_size": 8, f"{ACTOR}.ppo_mini_batch_size": 8, f"{CORRECTION}.rollout_is": None}
    for key, value in {**given, **values}.items():
        section, _, name = key.rpartition(".")
        owner = functools.reduce(getattr, section.split("."), cfg)
        assert hasattr(owner, name), key
        setattr(owner, name, value)
    return cfg


@pytest.mark.parametrize("values", ENOUGH, ids=str)
def test_enough(values: Mapping[str, Any]) -> None:
    assert is_one_pass_enough(config(values), step=2)


@pytest.mark.parametrize("values", NOT_ENOUGH, ids=str)
def test_not_enough(values: Mapping[str, Any]) -> None:
    assert not is_one_pass_enough(config(values), step=2)


def test_an_estimator_that_reads_old_logprobs(request: pytest.FixtureRequest) -> None:
    @register_adv_est("surprise", needs=("old_logprobs",))
    def surprise(scores_S, uids_S, config, *, old_logprobs):
        return scores_S

    request.addfinalizer(lambda: advantages._REGISTRY._forget("surprise"))
    assert not is_one_pass_enough(config({ESTIMATOR: "surprise"}), step=2)
