"""What one rank makes of the two log-probs of its rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.config.schema import RolloutCorrectionConfig
from scalerl.trainer.ranks.logprob_mismatch import compare_log_probs, worst_tokens

# Three samples: (token, sampled, rollout_logprob, old_logprob).
ROWS = [
    [(11, False, 0.0, 9.0), (12, True, -1.0, -1.5), (13, True, -2.0, -1.0)],
    [(21, False, 0.0, 0.0)],
    [(31, False, 0.0, -3.0), (32, False, 0.0, -3.0), (33, True, -0.5, -0.5), (34, True, -0.5, -0.6)],
]


def shard() -> DataProto:
    def column(at: int, dtype: torch.dtype) -> Jagged:
        return Jagged.from_list([[token[at] for token in row] for row in ROWS], dtype)

    return DataProto(
        {
            "input_ids": column(0, torch.int64),
            "response_mask": column(1, torch.bool),
            "rollout_logprobs": column(2, torch.float32),
            "old_logprobs": column(3, torch.float32),
        }
    )


def compare(**keys):
    # One rank: the mean of the weights takes no group.
    return compare_log_probs(shard(), RolloutCorrectionConfig(**keys), group=None, device="cpu")


def test_the_mismatch_is_measured_with_and_without_a_correction():
    metrics, columns = compare()
    corrected, _ = compare(rollout_is="token")
    assert columns.tokens == columns.samples == {} and metrics.items() <= corrected.items()
    # Sampled tokens: log-ratios -0.5, 1, 0, -0.1
    assert metrics["rollout_corr/kl"].value == pytest.approx(-0.4 / 4)
    assert metrics["rollout_corr/token_log_ratio_max"].value == pytest.approx(1.0)
    assert metrics["rollout_diff_partial/num"].value == 4
    assert not any("rollout_is" in key or "rollout_rs" in key for key in metrics)


def test_weights_and_mask_are_columns_of_the_rows():
    metrics, columns = compare(
        rollout_is="token", rollout_is_threshold=2.0, rollout_rs="token_k2", rollout_rs_threshold=0.1
    )
    weights, mask = columns.tokens["rollout_is_weights"], columns.tokens["loss_mask"]
    # k2 = 0.125, 0.5, 0, 0.005: the first row is rejected token by token
    assert [mask[row].tolist() for row in range(3)] == [[False] * 3, [False], [False, False, True, True]]
    assert weights[2].tolist() == pytest.approx([0, 0, 1, math.exp(-0.1)])
    assert weights.values[:4].tolist() == [0.0] * 4
    assert (weights.values.dtype, mask.values.dtype) == (torch.float32, torch.bool)
    assert metrics["rollout_corr/rollout_rs_num_dropped"].value == 1
    counts = columns.samples["num_loss_tokens"]
    assert counts.tolist() == [0, 0, 2] and isinstance(counts, np.ndarray)
    shard().union(columns)


def test_normalized_weights_have_mean_one():
    _, columns = compare(rollout_is="token", rollout_is_threshold=100.0, rollout_is_batch_normalize=True)
    weights = columns.tokens["rollout_is_weights"].values
    assert float(weights.sum()) / 4 == pytest.approx(1.0)
    assert float(weights[2] / weights[1]) == pytest.approx(math.exp(1.5))


def test_the_worst_token_of_each_row():
    worst = worst_tokens(shard())
    assert worst["position"].tolist() == [2, -1, 3]
    assert worst["difference"].tolist() == pytest.approx([1.0, 0.0, 0.1])
    assert worst["token_id"][[0, 2]].tolist() == [13, 34]
    assert worst["rollout_logprob"][[0, 2]].tolist() == pytest.approx([-2.0, -0.5])
    assert worst["old_logprob"][[0, 2]].tolist() == pytest.approx([-1.0, -0.6])
    assert all(len(values) == 3 and isinstance(values, np.ndarray) for values in worst.values())


def test_rows_without_tokens_are_counted_too():
    def column(rows: list[list[float]], dtype: torch.dtype) -> Jagged:
        return Jagged.from_list(rows, dtype)

    masks, zeros = [[1.0, 0.0], [], [1.0, 1.0], []], [[0.0, 0.0], [], [0.0, 0.0], []]
    tokens = {"response_mask": column(masks, torch.bool)}
    tokens |= {name: column(zeros, torch.float32) for name in ("rollout_logprobs", "old_logprobs")}
    _, columns = compare_log_probs(
        DataProto(tokens), RolloutCorrectionConfig(rollout_is="token"), group=None, device="cpu"
    )
    assert columns.samples["num_loss_tokens"].tolist() == [1, 0, 2, 0]
