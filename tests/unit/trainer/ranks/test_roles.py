"""Which columns the ranks get for a pass: those that it reads, whatever else the driver holds of a sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scalerl.algorithms import losses, register_policy_loss
from scalerl.batch import StepPlan
from scalerl.batch.turns import column_of
from scalerl.cluster.batch import TOKENS, PlacedBatch, ShardedBatch
from scalerl.cluster.dispatch import Collected, Future, registration_of
from scalerl.config.names import REFERENCE_LOSSES
from scalerl.config.schema import ActorConfig, AlgorithmConfig, CriticConfig, PolicyLossConfig
from scalerl.rollout.servers.reference import ReferenceServer
from scalerl.trainer.ranks.roles import (
    MegatronActor,
    MegatronCritic,
    MegatronReference,
    MegatronRewardModel,
)

NAMES = {"prompt_uid", "uid", "sample_index", "trajectory_index"}


class Ranks:
    """In the place of a group of two ranks, which answer every call. got: the names of its sample columns."""

    def __init__(self) -> None:
        self.got: list[set[str]] = []

    def call(self, method: Any, shards: ShardedBatch, **kwargs: Any) -> Any:
        self.got.append(set(shards.shard_samples(0)))
        samples = {name: np.zeros(4) for name in ("scores", "reward_kl")}
        collected = Collected({}, samples, ["of rank 0", "of rank 1"])
        return collected if registration_of(method).blocking else Future(lambda: collected)


@pytest.fixture
def ranks() -> Any:
    return Ranks()


@pytest.fixture
def batch() -> PlacedBatch:
    plan = StepPlan(((((0, 1),),), (((2, 3),),)), (1,))
    names = (
        *NAMES,
        "score",
        "rewards",
        "reward_failed",
        "baseline_score",
        "num_sampled_tokens",
        "reward_extra",
        "finish_reason",
    )
    placed = PlacedBatch(
        {name: np.arange(4) for name in names}, dict.fromkeys(("actor", "ref", "critic", "reward_model"), plan)
    )
    return placed.with_column(TOKENS, "actor", ("ids 0", "ids 1"))


def test_forward_passes_get_no_column_of_samples(ranks: Any, batch: PlacedBatch) -> None:
    actor, critic = MegatronActor(ranks, ActorConfig(), 1.0), MegatronCritic(ranks, CriticConfig())
    batch, _ = actor.begin_logprobs(batch).add_to(batch)
    batch, _ = MegatronReference(ranks, 1.0).begin_logprobs(batch).add_to(batch)
    batch, _ = critic.begin_values(batch).add_to(batch)
    MegatronRewardModel(ranks).begin_scores(batch)
    actor.worst_tokens(batch)
    actor.reward_kl(batch, "kl")
    assert ranks.got == [set()] * 6


def test_a_served_reference_is_asked_by_the_actors_ranks_which_can_name_samples(ranks: Any, batch: PlacedBatch) -> None:
    """No rank has a part called ref then, and its words are where an update looks for them."""
    batch = replace(batch, plans={"actor": batch.plans["actor"]}).with_column("old_logprobs", "actor", ("0", "1"))
    actor = MegatronActor(ranks, ActorConfig(), 1.0, distillation_coef=0.5)
    with pytest.raises(KeyError, match="ref_logprobs"):
        actor.update(batch.with_samples(advantages=np.zeros(4)))
    reference = MegatronReference(ranks, 1.0, 4, ReferenceServer("http://teacher:1"))
    batch, _ = reference.begin_logprobs(batch).add_to(batch)
    actor.update(batch.with_samples(advantages=np.zeros(4)))
    assert ranks.got == [{"uid", "sample_index"}, {"advantages"}]


@pytest.mark.parametrize(
    ("estimator", "kl_coef", "got"),
    [("gae", None, set()), ("gae", 0.1, set()), ("remax", None, {"baseline_score"})],
)
def test_an_estimator_of_tokens_gets_what_it_needs(
    ranks: Any, batch: PlacedBatch, estimator: str, kl_coef: float | None, got: set[str]
) -> None:
    actor = MegatronActor(ranks, ActorConfig(), 1.0)
    for name in ("values", "old_logprobs", "ref_logprobs"):
        batch = batch.with_column(name, "actor", ("0", "1"))
    actor.token_advantages(batch, AlgorithmConfig(adv_estimator=estimator), kl_coef=kl_coef)
    assert ranks.got == [{"rewards", "reward_failed"} | got]


def test_what_an_estimator_of_tokens_gets_of_turns(ranks: Any, batch: PlacedBatch) -> None:
    turns = {name: column_of([[1], [1, 2], [], [3]]) for name in ("turn_lengths", "turn_rewards", "turn_advantages")}
    actor = MegatronActor(ranks, ActorConfig(), 1.0)
    batch = batch.with_column("values", "critic", ("0", "1")).with_samples(**turns)
    actor.token_advantages(batch, AlgorithmConfig(adv_estimator="gae"), kl_coef=None)
    actor.spread_turn_advantages(batch)
    of_turns = {"turn_lengths", "turn_rewards"}
    assert ranks.got == [
        {"reward_failed", "reward_after", "turns_before"} | of_turns,
        {"turn_advantages"} | of_turns,
    ]


def test_the_score_of_a_reward_model_has_the_rewards_of_turns_too(ranks: Any, batch: PlacedBatch) -> None:
    styles = np.array(["model", "rule", "model", "model"], dtype=object)
    rewards = column_of([[1.0, 0.5], [4.0], [], [-1.0]])
    batch = batch.with_samples(reward_style=styles, turn_rewards=rewards, score=np.array([np.nan, 2.0, np.nan, np.nan]))
    scored, _ = MegatronRewardModel(ranks).begin_scores(batch).add_to(batch)
    assert scored.samples["score"].tolist() == [1.5, 2.0, 0.0, -1.0]


@pytest.mark.parametrize(("loss_mode", "names"), [("vanilla", set()), ("clip_cov", NAMES)])
def test_an_update_gets_the_advantages_and_what_its_loss_needs(
    ranks: Any, batch: PlacedBatch, loss_mode: str, names: set[str]
) -> None:
    """Of samples or of tokens, by what made them."""
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss_mode))
    actor = MegatronActor(ranks, config, 1.0)
    batch = batch.with_column("old_logprobs", "actor", ("0", "1"))
    actor.update(batch.with_samples(advantages=np.zeros(4)))
    of_tokens = batch.with_column("advantages", "actor", ("0", "1")).with_column("values", "critic", ("0", "1"))
    actor.update(of_tokens)
    MegatronCritic(ranks, CriticConfig()).update(of_tokens)
    assert ranks.got == [{"advantages"} | names, names, set()]


@pytest.fixture
def own_loss() -> Iterator[str]:
    def loss(logprobs_T: Any, old_logprobs_T: Any, advantages_T: Any, config: Any, **columns: Any) -> Any: ...

    needs = ("ref_logprobs", "weight", "sequences", "rollout_logprobs", "old_logprobs", "returns")
    register_policy_loss("of_columns", needs=needs)(loss)
    yield "of_columns"
    losses._REGISTRY._forget("of_columns")
    REFERENCE_LOSSES.discard("of_columns")


def test_a_loss_gets_the_columns_that_it_names(ranks: Any, batch: PlacedBatch, own_loss: str) -> None:
    """Without use_kl_loss; others come with the tokens, the old log-probs and the advantages."""
    actor = MegatronActor(ranks, ActorConfig(policy_loss=PolicyLossConfig(loss_mode=own_loss)), 1.0)
    batch = batch.with_column("old_logprobs", "actor", ("0", "1")).with_samples(advantages=np.zeros(4))
    with pytest.raises(ValueError, match=rf"policy_loss.loss_mode={own_loss} needs ref_logprobs, weight, which"):
        actor.update(batch)
    batch = batch.with_column("ref_logprobs", "ref", ("2", "3")).with_samples(weight=np.ones(4))
    actor.update(batch)
    actor.evaluate_and_update(batch)
    assert ranks.got == [{"advantages", "weight"}] * 2
