"""Estimators of single tokens against plain Python loops over the sampled tokens of each sequence."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.algorithms import adv_estimator_names, get_adv_estimator
from scalerl.batch.data_proto import cu_seqlens_of
from scalerl.config.schema import AlgorithmConfig

ALL = [name for name in adv_estimator_names() if get_adv_estimator(name).per_token]
# Those that learn from rewards.
PER_TOKEN = [name for name in ALL if name != "on_policy_distillation"]
NUMBERS = st.floats(-3, 3, width=32)
# Reward, value, whether the policy sampled it.
BATCH = st.lists(st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=9), min_size=1, max_size=5)

Rows = list[list[tuple[float, float, bool]]]


def estimate(name: str, rows: Rows, baselines: list[float], config: AlgorithmConfig):
    tokens = [token for row in rows for token in row]
    rewards, values, mask = (torch.tensor([token[at] for token in tokens]) for at in range(3))
    # Nothing that is held where the policy did not sample may count.
    rewards, values = (torch.where(mask, column, torch.nan) for column in (rewards, values))
    estimator = get_adv_estimator(name)
    given = {"values": values, "baseline_score": torch.tensor(baselines)}
    columns = {need: given[need] for need in estimator.needs}
    return estimator(rewards, mask, cu_seqlens_of([len(row) for row in rows]), config, **columns)


def by_hand(name: str, rows: Rows, baselines: list[float], config: AlgorithmConfig) -> tuple[list[float], list[float]]:
    """Backwards over the sampled tokens, as if the others were not there."""
    advantages, returns = [], []
    for row, baseline in zip(rows, baselines, strict=True):
        advantage_and_return_of: dict[int, tuple[float, float]] = {}
        later_return, later_value, later_advantage = 0.0, 0.0, 0.0
        for at in reversed([at for at, token in enumerate(row) if token[2]]):
            reward, value, _ = row[at]
            if name == "gae":
                later_advantage = (
                    reward + config.gamma * later_value - value + config.gamma * config.lam * later_advantage
                )
                later_value = value
                advantage_and_return_of[at] = (later_advantage, later_advantage + value)
            else:
                gamma = config.gamma if name == "reinforce_plus_plus" else 1.0
                later_return = reward + gamma * later_return
                advantage_and_return_of[at] = (later_return - (baseline if name == "remax" else 0.0), later_return)
        for at in range(len(row)):
            advantage, target = advantage_and_return_of.get(at, (0.0, 0.0))
            advantages.append(advantage)
            returns.append(target)
    return advantages, returns


def test_all_of_them_are_here():
    assert set(ALL) == {"gae", "reinforce_plus_plus", "remax", "on_policy_distillation"}


def test_distillation_is_less_the_reverse_kl_of_each_sampled_token():
    estimator = get_adv_estimator("on_policy_distillation")
    student, teacher = torch.tensor([-1.0, -0.5, torch.nan, -2.0]), torch.tensor([-0.25, -0.75, 1.0, -2.0])
    mask, rewards = torch.tensor([True, True, False, True]), torch.full((4,), torch.nan)
    columns = {"old_logprobs": student, "ref_logprobs": teacher}
    advantages, returns = estimator(rewards, mask, cu_seqlens_of([3, 1]), AlgorithmConfig(), **columns)
    assert advantages.tolist() == returns.tolist() == [0.75, -0.25, 0.0, 0.0]
    assert not estimator.whiten and set(estimator.needs) == columns.keys()


@pytest.mark.parametrize("name", PER_TOKEN)
@settings(max_examples=40)
@given(rows=BATCH, gamma=st.sampled_from([0.0, 0.9, 1.0]), lam=st.sampled_from([0.5, 1.0]), data=st.data())
def test_equals_the_formula(name, rows, gamma, lam, data):
    config = AlgorithmConfig(adv_estimator=name, gamma=gamma, lam=lam)
    baselines = data.draw(st.lists(NUMBERS, min_size=len(rows), max_size=len(rows)))
    advantages_and_returns = estimate(name, rows, baselines, config)
    for got, want in zip(advantages_and_returns, by_hand(name, rows, baselines, config), strict=True):
        assert got.dtype == torch.float32
        assert got.tolist() == pytest.approx(want, rel=1e-5, abs=1e-5)


def test_reinforce_plus_plus_by_hand():
    # A penalty on each token and the score on the last; the second token is a tool's.
    rows = [[(-0.1, 0, True), (9.0, 0, False), (-0.2, 0, True), (0.7, 0, True)]]
    advantages, returns = estimate("reinforce_plus_plus", rows, [0.0], AlgorithmConfig(gamma=0.5))
    assert returns.tolist() == pytest.approx([-0.1 + 0.5 * (-0.2 + 0.35), 0.0, -0.2 + 0.35, 0.7])
    assert advantages.tolist() == returns.tolist()
    assert get_adv_estimator("reinforce_plus_plus").whiten


def test_remax_by_hand():
    rows = [[(0.0, 0, False), (0.0, 0, True), (1.0, 0, True)], [(0.25, 0, True)]]
    advantages, returns = estimate("remax", rows, [0.75, 1.0], AlgorithmConfig(gamma=0.5))
    assert returns.tolist() == [0.0, 1.0, 1.0, 0.25]
    assert advantages.tolist() == [0.0, 0.25, 0.25, -0.75]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_greedy_score_that_is_not_finite_is_named(bad):
    with pytest.raises(ValueError, match="greedy response to sequence 1"):
        estimate("remax", [[(1.0, 0, True)]] * 2, [0.0, bad], AlgorithmConfig())


@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_sequence_without_sampled_tokens_has_nothing(name):
    rows = [[(1.0, 1.0, False)] * 3, [(1.0, 0.0, True)]]
    advantages, returns = estimate(name, rows, [0.5, 0.0], AlgorithmConfig())
    assert advantages.tolist() == returns.tolist() == [0.0, 0.0, 0.0, 1.0]
