"""From scores to rewards to advantages, for estimators of samples and of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from scalerl.algorithms import KLController
from scalerl.balance import plan_step
from scalerl.cluster.batch import PlacedBatch
from scalerl.config.schema import AlgorithmConfig, KLControlConfig
from scalerl.metrics import to_floats
from scalerl.trainer.step_advantages import estimate_advantages, needs_greedy_baseline

KL_SUMS = np.array([2.0, 1.0, 0.0, 0.5])
KL_MEAN = (2.0 / 4 + 1.0 / 5 + 0.5 / 1) / 3


@dataclass
class KnownKL:
    """An actor whose KL is known. asked: what it was asked for token by token."""

    asked: list[float | None] = field(default_factory=list)

    def reward_kl(self, batch, kind):
        assert kind == "k3"
        return KL_SUMS

    def token_advantages(self, batch, config, *, kl_coef):
        self.asked.append(kl_coef)
        return batch, {}


def batch() -> PlacedBatch:
    lengths = np.array([4, 5, 0, 1])
    plan = plan_step(lengths + 2, dp_size=1, mini_batches=[range(4)], max_tokens_per_micro_batch=64)
    scores, uids = np.array([1.0, 0.0, 3.0, 5.0]), np.array([0, 0, 1, 1])
    # Of longer responses, which have observations too.
    samples = {"score": scores, "uid": uids, "num_sampled_tokens": lengths, "response_length": lengths + 3}
    return PlacedBatch(samples, {"actor": plan})


def config(name: str) -> AlgorithmConfig:
    return AlgorithmConfig(name, norm_adv_by_std_in_grpo=False, use_kl_in_reward=True, kl_penalty="k3")


def test_the_kl_of_a_sample_is_taken_off_its_score():
    controller = KLController.of(KLControlConfig(kl_coef=0.5))
    placed, metrics = estimate_advantages(KnownKL(), batch(), config("grpo"), controller)
    assert placed.samples["rewards"].tolist() == [0.0, -0.5, 3.0, 4.75]
    assert placed.samples["score"].tolist() == [1.0, 0.0, 3.0, 5.0]
    assert placed.samples["advantages"].tolist() == [0.25, -0.25, -0.875, 0.875]
    metric_values = to_floats(metrics)
    assert metric_values == {
        # A sample without tokens has no mean.
        "actor/reward_kl_penalty": pytest.approx(KL_MEAN),
        "actor/reward_kl_penalty_coeff": 0.5,
    }


def test_the_weight_of_a_step_is_that_of_the_step_before_it():
    actor = KnownKL()
    controller = KLController.of(KLControlConfig("adaptive", kl_coef=0.5, horizon=10, target_kl=KL_MEAN / 1.1))
    _, metrics = estimate_advantages(actor, batch(), config("reinforce_plus_plus"), controller)
    assert actor.asked == [0.5] and to_floats(metrics)["actor/reward_kl_penalty_coeff"] == 0.5
    assert controller.coef == pytest.approx(0.5 * (1 + 0.1 * 4 / 10))


def test_without_a_controller_scores_are_rewards():
    actor = KnownKL()
    placed, metrics = estimate_advantages(actor, batch(), config("rloo"), None)
    assert placed.samples["advantages"].tolist() == [1.0, -1.0, -2.0, 2.0]
    assert metrics == {} and "rewards" not in placed.samples
    estimate_advantages(actor, batch(), config("reinforce_plus_plus"), None)
    assert actor.asked == [None]


def test_an_estimator_gets_its_column():
    placed, _ = estimate_advantages(KnownKL(), batch(), config("opo"), None)
    # Baselines: 4/9 of 1 and 5/9 of 0; all of 5.
    assert placed.samples["advantages"] == pytest.approx([5 / 9, -4 / 9, -2.0, 0.0])


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match="remax needs baseline_score, which this run does not make"):
        estimate_advantages(KnownKL(), batch(), config("remax"), None)
    assert needs_greedy_baseline(config("remax")) and not needs_greedy_baseline(config("grpo"))
