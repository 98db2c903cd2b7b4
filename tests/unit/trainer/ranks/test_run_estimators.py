"""KL in the reward and token-level advantages of one rank's rows, against loops over the samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from scalerl.algorithms import advantages, register_token_adv_est
from scalerl.batch.columns import OLD_LOGPROBS, RESPONSE_MASK
from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.batch.turns import column_of
from scalerl.config.schema import AlgorithmConfig, PolicyLossConfig
from scalerl.tracking.metrics import explained_variance_metrics, to_floats
from scalerl.trainer.ranks.run_estimators import (
    reward_kl,
    selected_tokens_column,
    sums_of_rows,
    token_advantages,
    turn_advantages_on_tokens,
)

# Of each row: policy's and reference's log-prob and mask of its tokens; one without a sampled token.
ROWS = [
    ([0.0, -1.0, -2.0, -0.5], [0.0, -1.5, -1.0, -0.5], [0, 1, 1, 1]),
    ([0.0, 0.0, -3.0, -9.0, -1.0], [math.nan, math.nan, -1.0, math.nan, -2.0], [0, 0, 1, 0, 1]),
    ([0.0, 0.0], [0.0, 0.0], [0, 0]),
]
SCORES = [1.0, -0.5, 2.0]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory):
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def shard() -> DataProto:
    columns = {
        name: Jagged.from_list([row[at] for row in ROWS], kind)
        for at, (name, kind) in enumerate(
            [("old_logprobs", torch.float32), ("ref_logprobs", torch.float32), ("response_mask", torch.bool)]
        )
    }
    samples = {"rewards": np.array(SCORES), "reward_failed": np.zeros(3, bool)} | {
        name: np.arange(3) for name in ("uid", "prompt_uid", "sample_index")
    }
    samples["trajectory_index"] = np.zeros(3, dtype=int)
    return DataProto(columns, samples)


def test_kl_of_each_row():
    kl = reward_kl(shard(), "k1", old_logprobs=OLD_LOGPROBS)
    assert kl.values.tolist() == [0, 0.5, -1.0, 0, 0, 0, -2.0, 0, 1.0, 0, 0]
    assert sums_of_rows(kl).tolist() == [-0.5, -1.0, 0.0]
    assert sums_of_rows(reward_kl(shard(), "abs", old_logprobs=OLD_LOGPROBS)).tolist() == [1.5, 3.0, 0.0]


def test_the_kl_is_taken_off_every_token_and_the_score_comes_last(group):
    config = AlgorithmConfig(adv_estimator="reinforce_plus_plus", gamma=0.5, kl_penalty="k1")
    metrics, columns = token_advantages(shard(), config, (0.1, OLD_LOGPROBS), group=group, device="cpu")
    # Rewards: -0.05, 0.1, 1.0 and 0.2, -0.6.
    first = [-0.05 + 0.5 * (0.1 + 0.5), 0.1 + 0.5, 1.0]
    second = [0.2 - 0.3, -0.6]
    returns = columns.tokens["returns"].values.tolist()
    assert returns == pytest.approx([0, *first, 0, 0, second[0], 0, second[1], 0, 0])
    sampled = np.array([*first, *second])
    whitened = (sampled - sampled.mean()) / math.sqrt(sampled.var(ddof=1) + 1e-8)
    advantages = columns.tokens["advantages"].values.numpy()
    assert advantages[[1, 2, 3, 6, 8]] == pytest.approx(whitened, rel=1e-5)
    assert not advantages[[0, 4, 5, 7, 9, 10]].any()
    metric_values = to_floats(metrics)
    assert metric_values["critic/returns/mean"] == pytest.approx(sampled.mean())
    assert metric_values["critic/advantages/max"] == pytest.approx(whitened.max())
    assert not any(key.startswith("critic/v") for key in metric_values)


def test_without_a_kl_the_score_is_all_there_is(group):
    config = AlgorithmConfig(adv_estimator="reinforce_plus_plus")
    _, columns = token_advantages(shard(), config, None, group=group, device="cpu")
    assert columns.tokens["returns"].values.tolist() == [0, 1, 1, 1, 0, 0, -0.5, 0, -0.5, 0, 0]


def test_gae_reads_the_values(group):
    batch = shard()
    values = Jagged(torch.full((11,), 0.25), batch.tokens["response_mask"].cu_seqlens)
    config = AlgorithmConfig(adv_estimator="gae", gamma=1.0, lam=1.0)
    metrics, columns = token_advantages(
        batch.union(DataProto({"values": values})), config, None, group=group, device="cpu"
    )
    assert columns.tokens["returns"].values[[1, 2, 3, 6, 8]].tolist() == [1, 1, 1, -0.5, -0.5]
    metric_values = to_floats(explained_variance_metrics(metrics))
    assert metric_values["critic/values/mean"] == 0.25 and "critic/vf_explained_var" in metric_values


def test_remax_takes_the_greedy_score_off(group):
    batch = shard().union(DataProto(samples={"baseline_score": np.array([0.5, 0.5, 0.5])}))
    config = AlgorithmConfig(adv_estimator="remax")
    _, columns = token_advantages(batch, config, None, group=group, device="cpu")
    # Not whitened.
    assert columns.tokens["advantages"].values.tolist() == [0, 0.5, 0.5, 0.5, 0, 0, -1, 0, -1, 0, 0]


def with_a_failed_one(rewards: list[float]) -> DataProto:
    """Rows of which the second one failed."""
    batch = shard()
    batch.samples["rewards"], batch.samples["reward_failed"] = np.array(rewards), np.array([False, True, False])
    return batch


def test_a_failed_sample_is_in_no_mean_of_token_advantages_and_no_better_than_the_worst(group):
    config = AlgorithmConfig(adv_estimator="reinforce_plus_plus", gamma=0.5)
    _, columns = token_advantages(with_a_failed_one([1.0, -0.5, 0.0]), config, None, group=group, device="cpu")
    sampled = np.array([0.25, 0.5, 1.0])
    whitened = (sampled - sampled.mean()) / math.sqrt(sampled.var(ddof=1) + 1e-8)
    advantages = columns.tokens["advantages"].values.numpy()
    assert advantages[1:4] == pytest.approx(whitened, rel=1e-5)
    # Far below all others: no lower than the lowest of them.
    assert advantages[[6, 8]] == pytest.approx(whitened.min(), rel=1e-5)
    # All others are alike, so that nothing says how much worse it is.
    config = AlgorithmConfig(adv_estimator="reinforce_plus_plus")
    _, columns = token_advantages(with_a_failed_one([1.0, 0.0, 0.0]), config, None, group=group, device="cpu")
    assert not columns.tokens["advantages"].values.any()


def test_a_critic_learns_nothing_from_a_failed_sample(group):
    config = AlgorithmConfig(adv_estimator="gae", gamma=1.0, lam=1.0)
    advantages, returns, explained = [], [], []
    for reward in (-1.0, 5.0):
        batch = with_a_failed_one([1.0, reward, 0.0])
        values = Jagged(torch.linspace(-2.0, 0.5, 11), batch.tokens["response_mask"].cu_seqlens)
        metrics, columns = token_advantages(
            batch.union(DataProto({"values": values})), config, None, group=group, device="cpu"
        )
        advantages.append(columns.tokens["advantages"].values.tolist())
        returns.append(columns.tokens["returns"].values.tolist())
        explained.append(to_floats(explained_variance_metrics(metrics))["critic/vf_explained_var"])
        assert [returns[-1][at] for at in (6, 8)] == values.values[[6, 8]].tolist()
        assert max(advantages[-1][at] for at in (6, 8)) <= 0.0
    # Of the others nothing depends on it.
    assert advantages[0][:4] == advantages[1][:4] and returns[0] == returns[1] and explained[0] == explained[1]


def with_turns() -> DataProto:
    """Turns of 2 and 1 tokens in the first row; of 0, 1 and 1 in the second, before which its episode has 4."""
    made = {"turn_lengths": column_of([[2, 1], [0, 1, 1], []]), "turns_before": np.array([0, 4, 0])}
    made |= {"turn_rewards": column_of([[0.5, 0.25], [9.0, -1.0, 2.0], []]), "reward_after": np.array([1.0, 0.125, 2])}
    return shard().union(DataProto(samples=made))


def test_the_reward_of_a_turn_is_at_its_last_token_and_the_rest_at_the_end_of_the_row(group):
    """The reward of a turn without a token has nobody before it who could have earned it."""
    config = AlgorithmConfig(adv_estimator="reinforce_plus_plus", gamma=0.5)
    _, columns = token_advantages(with_turns(), config, None, group=group, device="cpu")
    last = 0.25 + 1.0
    middle = 0.5 + 0.5 * last
    second = [-1.0 + 0.5 * (2.0 + 0.125), 2.0 + 0.125]
    returns = columns.tokens["returns"].values.tolist()
    assert returns == [0, 0.5 * middle, middle, last, 0, 0, second[0], 0, second[1], 0, 0]


def test_an_estimator_of_tokens_gets_the_turn_of_each_token(group):
    """Counted through the episode, of which this rank has no other row."""
    got = []

    @register_token_adv_est("of_turns", needs=("turn_index",))
    def of_turns(rewards_T, response_mask_T, cu_seqlens, config, *, turn_index):
        got.append(turn_index)
        return rewards_T, rewards_T

    try:
        config = AlgorithmConfig(adv_estimator="of_turns")
        _, columns = token_advantages(with_turns(), config, None, group=group, device="cpu")
    finally:
        advantages._REGISTRY._forget("of_turns")
    assert got[0].tolist() == [-1, 0, 0, 1, -1, -1, 5, -1, 6, -1, -1] and got[0].dtype == torch.int64
    assert columns.tokens["advantages"].values.tolist() == [0, 0, 0.5, 1.25, 0, 0, -1.0, 0, 2.125, 0, 0]


def test_advantages_of_turns_are_those_of_their_tokens():
    made = column_of([[1.0, -1.0], [9.0, 0.25, 0.5], []])
    metrics, columns = turn_advantages_on_tokens(with_turns().union(DataProto(samples={"turn_advantages": made})))
    expected = [0, 1.0, 1.0, -1.0, 0, 0, 0.25, 0, 0.5, 0, 0]
    for name in ("advantages", "returns"):
        column = columns.tokens[name].values
        assert column.tolist() == expected and column.dtype == torch.float32
        assert to_floats(metrics)[f"critic/{name}/mean"] == pytest.approx(sum(expected) / 5)


def test_covariance_is_of_each_mini_batch_by_itself(group):
    batch = shard()
    cu_seqlens = batch.tokens["response_mask"].cu_seqlens
    advantages = torch.tensor([0, 1, 1, 1, 0, 0, -1, 0, -1, 0, 0.0])
    batch = batch.union(DataProto({"advantages": Jagged(advantages, cu_seqlens)}))
    config = PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.4)

    def selected(mini_batches, totals):
        column = selected_tokens_column(
            batch, mini_batches, config, totals, mask=RESPONSE_MASK, group=group, device="cpu"
        )
        return column.values.nonzero().squeeze(1).tolist()

    # All: means -1.5 and 0.2; the greatest are token 3 (0.8 x 1.0) and token 6 (-1.2 x -1.5).
    assert selected([[[0, 1], [2]]], [{"num_loss_tokens": 5}]) == [3, 6]
    # Alone, each row has one advantage: covariances of 0, and the keys decide; one token each.
    apart = selected([[[0]], [[2, 1]]], [{"num_loss_tokens": 3}, {"num_loss_tokens": 2}])
    assert [at < 4 for at in apart] == [True, False]
