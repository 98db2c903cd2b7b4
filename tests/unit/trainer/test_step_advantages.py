"""From scores to rewards to advantages, for estimators of samples and of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from scalerl.algorithms import KLController, adv_estimator_names, get_adv_estimator
from scalerl.base.user_code import UserCodeError
from scalerl.batch import plan_step
from scalerl.batch.turns import column_of
from scalerl.cluster.batch import HeldRows, PlacedBatch
from scalerl.config.schema import AlgorithmConfig, KLControlConfig
from scalerl.tracking.metrics import Metric, to_floats
from scalerl.tracking.metrics.failed_samples import as_wrong
from scalerl.trainer.step_advantages import add_greedy_baseline, estimate_advantages, needs_greedy_baseline

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
    samples |= {"reward_penalty": np.zeros(4), "reward_failed": np.zeros(4, bool), "data_source": np.array(["a"] * 4)}
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
    assert metrics == {} and placed.samples["rewards"].tolist() == placed.samples["score"].tolist()
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


def with_failed(scores: list[float | None], uids: list[int], penalties: list[float] | None = None) -> PlacedBatch:
    """None: the sample failed, and has the score that the rollout gives it."""
    plan = plan_step(np.full(len(uids), 4), dp_size=1, mini_batches=[range(len(uids))], max_tokens_per_micro_batch=64)
    failed, sources = np.array([score is None for score in scores]), np.array(["a"] * len(uids))
    samples = {
        "score": as_wrong([score or 0.0 for score in scores], sources, failed),
        "uid": np.array(uids),
        "num_sampled_tokens": np.arange(1, len(uids) + 1),
        "reward_penalty": np.array(penalties or [0.0] * len(uids)),
        "reward_failed": failed,
        "data_source": sources,
    }
    return PlacedBatch(samples, {"actor": plan})


def rows_of(batch: PlacedBatch, rows: list[int]) -> PlacedBatch:
    return PlacedBatch({name: column[rows] for name, column in batch.samples.items()}, batch.plans)


def advantages_of(name: str, batch: PlacedBatch) -> np.ndarray:
    return estimate_advantages(KnownKL(), batch, config(name), None)[0].samples["advantages"]


@pytest.mark.parametrize("name", [name for name in adv_estimator_names() if not get_adv_estimator(name).per_token])
def test_a_failed_sample_votes_in_no_baseline_and_is_no_better_than_the_worst_of_its_group(name: str) -> None:
    batch = with_failed([-1.0, None, 1.0, 1.0, None, -1.0, 0.5, 1.0], [0, 0, 0, 1, 1, 1, 1, 2])
    advantages, scored = advantages_of(name, batch), [0, 2, 3, 5, 6, 7]
    assert advantages[scored].tolist() == advantages_of(name, rows_of(batch, scored)).tolist()
    assert advantages[1] == min(0.0, *advantages[[0, 2]]) and advantages[4] == min(0.0, *advantages[[3, 5, 6]])


def test_a_failed_sample_among_wrong_ones_teaches_nothing() -> None:
    """Of DAPO's -1 and 1: the 0 that stands for no score is above a wrong answer's -1."""
    assert advantages_of("grpo", with_failed([-1.0, None, -1.0, None], [0] * 4)).tolist() == [0.0] * 4


def test_a_sample_whose_siblings_failed_is_compared_with_nothing() -> None:
    assert advantages_of("grpo", with_failed([1.0, None, None, None, None], [0, 0, 0, 1, 1])).tolist() == [0.0] * 5


def test_raw_and_shaped_scores_are_two_values() -> None:
    batch = with_failed([-1.0, -1.0, None, 1.0], [0, 0, 1, 1], penalties=[0.0, -0.5, 0.0, -0.25])
    samples = estimate_advantages(KnownKL(), batch, config("grpo"), None)[0].samples
    assert samples["score"].tolist() == [-1.0, -1.0, -1.0, 1.0]
    # The failed one is no better than any other with its penalty.
    assert samples["rewards"].tolist() == [-1.0, -1.5, -1.5, 0.75]
    assert samples["advantages"].tolist() == [0.25, -0.25, 0.0, 0.0]


def test_a_greedy_response_that_failed_is_no_baseline() -> None:
    class Greedy:
        def greedy_scores(self, samples: HeldRows) -> tuple[np.ndarray, dict[str, Metric]]:
            return np.array([-1.0, -1.0, np.nan, np.nan]), {}

    samples = with_failed([1.0, -1.0, 1.0, None], [0, 0, 1, 1], penalties=[0.0, 0.0, -0.5, 0.0]).samples
    made, metrics = add_greedy_baseline(Greedy(), HeldRows(samples))
    assert made.samples["baseline_score"].tolist() == [-1.0, -1.0, 0.5, -1.0]
    assert to_floats(metrics) == {"critic/baseline_score/mean": -1.0}


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "grpo_passk"])
def test_a_sample_of_several_trajectories_is_compared_once(name: str) -> None:
    """Its rows have the advantage that the sample has where it is one row; its KL is that of all its rows."""
    lengths, kl_sums, rows = np.array([4, 5, 3, 1]), np.array([2.0, 1.0, 0.25, 0.5]), np.array([0, 1, 1, 1, 2, 3, 3])
    uids, scores = np.array([0, 0, 1, 1]), np.array([1.0, 0.0, 3.0, 5.0])

    def step(row_S: np.ndarray, lengths_S: np.ndarray) -> dict[str, np.ndarray]:
        samples = {"uid": uids[row_S], "sample_index": row_S, "score": scores[row_S], "num_sampled_tokens": lengths_S}
        agents = np.array([""] * len(row_S), dtype=object)
        samples |= {"agent": agents, "data_source": agents, "reward_penalty": np.zeros(len(row_S))}
        return samples | {"reward_failed": np.zeros(len(row_S), bool)}

    def result(samples: dict[str, np.ndarray], kl_S: np.ndarray) -> tuple[np.ndarray, dict[str, Metric]]:
        class Actor(KnownKL):
            def reward_kl(self, batch, kind):
                return kl_S

        num_tokens_S = samples["num_sampled_tokens"] + 2
        plan = plan_step(num_tokens_S, dp_size=1, mini_batches=[range(len(kl_S))], max_tokens_per_micro_batch=64)
        controller = KLController.of(KLControlConfig(kl_coef=0.5))
        placed, metrics = estimate_advantages(Actor(), PlacedBatch(samples, {"actor": plan}), config(name), controller)
        return placed.samples["advantages"], metrics

    whole, whole_metrics = result(step(np.arange(4), lengths), kl_sums)
    parts = np.array([4, 1, 1, 3, 3, 1, 0]), np.array([2.0, 0.5, 0.0, 0.5, 0.25, 0.25, 0.25])
    cut, cut_metrics = result(step(rows, parts[0]), parts[1])
    np.testing.assert_array_equal(cut, whole[rows])
    assert to_floats(cut_metrics) == to_floats(whole_metrics) and len(set(whole.tolist())) > 1


def test_two_agents_of_a_game_are_not_compared_with_each_other() -> None:
    """What black wins white loses: each has a baseline of its own, where one over both would be 0."""
    lengths = np.ones(4, dtype=int)
    plan = plan_step(lengths, dp_size=1, mini_batches=[range(4)], max_tokens_per_micro_batch=64)
    agents = np.array(["black", "white"] * 2, dtype=object)
    samples = {"uid": np.zeros(4, int), "sample_index": np.array([0, 0, 1, 1]), "agent": agents}
    samples |= {"score": np.array([1.0, -1.0, 0.5, -0.5]), "num_sampled_tokens": lengths, "data_source": agents}
    samples |= {"reward_penalty": np.zeros(4), "reward_failed": np.zeros(4, bool)}
    placed, _ = estimate_advantages(KnownKL(), PlacedBatch(samples, {"actor": plan}), config("grpo"), None)
    assert placed.samples["advantages"].tolist() == [0.25, -0.25, -0.25, 0.25]


def step_of(rows: list[tuple[int, int, list[float], float]], failed: tuple[int, ...] = ()) -> PlacedBatch:
    """rows: (group, sample, rewards of its turns, what the whole sample earns beside them); a turn has three tokens."""
    uids, indices, rewards, own = zip(*rows, strict=True)
    names = list(zip(uids, indices, strict=True))
    totals = [sum(sum(each) for other, each in zip(names, rewards, strict=True) if other == name) for name in names]
    counts, failed_S = np.array([len(each) for each in rewards]), np.array([row in failed for row in range(len(rows))])
    samples = {
        "uid": np.array(uids),
        "sample_index": np.array(indices),
        "score": np.where(failed_S, 0.0, np.array(totals) + np.array(own)),
        "num_turns": counts,
        "num_sampled_tokens": 3 * counts,
        "turn_lengths": column_of([[3] * len(each) for each in rewards]),
        "turn_rewards": column_of([[0.0] * len(each) if row in failed else each for row, each in enumerate(rewards)]),
        "data_source": np.array(["a"] * len(rows)),
        "reward_penalty": np.zeros(len(rows)),
        "reward_failed": failed_S,
    }
    plan = plan_step(np.full(len(rows), 9), dp_size=1, mini_batches=[range(len(rows))], max_tokens_per_micro_batch=99)
    return PlacedBatch(samples, {"actor": plan})


def turn_level(name: str, batch: PlacedBatch, gamma: float = 1.0) -> list[tuple[float, ...]]:
    """The advantages of the turns of each row."""
    spread: list[PlacedBatch] = []

    class Actor(KnownKL):
        def spread_turn_advantages(self, batch):
            spread.append(batch)
            return batch, {}

    placed, _ = estimate_advantages(Actor(), batch, AlgorithmConfig(name, turn_level=True, gamma=gamma), None)
    assert "turn_advantages" not in placed.samples
    return spread[0].samples["turn_advantages"].tolist()


ESTIMATORS_OF_SAMPLES = [name for name in adv_estimator_names() if not get_adv_estimator(name).per_token]


@pytest.mark.parametrize("name", ESTIMATORS_OF_SAMPLES)
@pytest.mark.parametrize("of_last_turn", [True, False])
def test_what_is_earned_at_the_end_is_worth_to_every_turn_what_it_is_to_the_sample(
    name: str, of_last_turn: bool
) -> None:
    """Bit for bit, where all samples have as many turns."""
    scores = [1.0, -0.5, 0.25, 0.0, 0.0, 2.0]
    turns, own = [scores, [0.0] * 6] if of_last_turn else [[0.0] * 6, scores]
    batch = step_of([(row // 3, row, [0.0, 0.0, turns[row]], own[row]) for row in range(6)])
    whole = estimate_advantages(KnownKL(), batch, AlgorithmConfig(name), None)[0].samples["advantages"]
    if name == "reinforce_plus_plus_baseline":
        # Sums over all tokens of the step are rounded in another order.
        assert np.array(turn_level(name, batch)) == pytest.approx(np.stack([whole] * 3, 1), rel=1e-6)
    else:
        assert turn_level(name, batch) == [(advantage,) * 3 for advantage in whole.tolist()]
    assert any(whole)


def test_a_turn_is_compared_with_the_same_turn_of_the_others_by_what_comes_from_it_on() -> None:
    """The first sample has a third turn, which is compared with nothing."""
    rewards, own, gamma = [[1.0, 0.0, 2.0], [0.0, 3.0], [0.5, -1.0]], [0.5, 0.0, 1.0], 0.5
    batch = step_of([(0, row, each, extra) for row, (each, extra) in enumerate(zip(rewards, own, strict=True))])
    whole = [[*each[:-1], each[-1] + extra] for each, extra in zip(rewards, own, strict=True)]
    found = turn_level("grpo", batch, gamma)
    for turn in (0, 1):
        returns = np.array([sum(gamma**n * reward for n, reward in enumerate(each[turn:])) for each in whole])
        expected = (returns - returns.mean()) / (returns.std(ddof=1) + 1e-6)
        assert [each[turn] for each in found] == pytest.approx(expected.tolist(), rel=1e-6)
    assert found[0][2] == 0.0


@pytest.mark.parametrize("name", ESTIMATORS_OF_SAMPLES)
def test_turns_are_compared_alike_in_one_row_and_in_several(name: str) -> None:
    whole = [(0, 0, [0.5, 0.0, 1.0], 0.5), (0, 1, [0.0, 1.0, 0.0], 0.25), (1, 2, [1.0, 2.0], 0.0), (1, 3, [3.0], 0.0)]
    cut = [(0, 0, [0.5], 0.5), (0, 0, [0.0, 1.0], 0.5), (0, 1, [0.0, 1.0, 0.0], 0.25), (1, 2, [1.0], 0.0)]
    cut += [(1, 2, [2.0], 0.0), (1, 3, [3.0], 0.0)]
    one, two, three, four = turn_level(name, step_of(whole), 0.75)
    assert turn_level(name, step_of(cut), 0.75) == [one[:1], one[1:], two, three[:1], three[1:], four]


def test_the_turns_of_a_failed_sample_vote_in_no_baseline_and_are_no_better_than_the_worst() -> None:
    rows = [(0, 0, [1.0, 0.0], 0.0), (0, 1, [0.0, 0.0], 0.0), (0, 2, [0.0, 2.0], 1.0)]
    first, failed, third = turn_level("grpo", step_of(rows, failed=(1,)))
    assert [first, third] == turn_level("grpo", step_of([rows[0], rows[2]]))
    assert failed == tuple(min(0.0, *turn) for turn in zip(first, third, strict=True))


def test_a_sample_that_is_its_whole_group_has_its_returns() -> None:
    assert turn_level("rloo", step_of([(0, 0, [1.0, 0.5], 0.25)])) == [(1.75, 0.75)]


def test_an_estimator_of_tokens_has_no_turns_to_compare() -> None:
    with pytest.raises(UserCodeError, match=r"turn_level = true: .*gae_of_critic .* set algorithm.turn_level=false"):
        estimate_advantages(KnownKL(), step_of([(0, 0, [1.0], 0.0)]), AlgorithmConfig("gae", turn_level=True), None)
