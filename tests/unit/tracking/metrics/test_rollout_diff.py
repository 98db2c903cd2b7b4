from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from scalerl.tracking.metrics import Metric, merge_metrics, rollout_diff_metrics, rollout_diff_sums, to_floats

CORR = "training/rollout_actor_probs_pearson_corr"


def tokens(num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(num, generator=generator) * 3
    old = rollout + 0.05 * torch.randn(num, generator=generator)
    return rollout, old, torch.rand(num, generator=generator) < 0.7


@pytest.mark.parametrize("cuts", [(), (40,), (1, 2, 60, 60)])
def test_any_split_over_ranks_gives_the_numbers_of_the_whole(cuts):
    rollout, old, mask = tokens(100)
    pieces = zip(*(column.tensor_split(list(cuts)) for column in (rollout, old, mask)), strict=True)
    metrics = to_floats(rollout_diff_metrics(merge_metrics(rollout_diff_sums(*piece) for piece in pieces)))
    x, y = (np.exp(c[mask].double().numpy()) for c in (rollout, old))
    assert metrics == pytest.approx(
        {
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_mean": np.abs(x - y).mean(),
            "training/rollout_probs_diff_max": np.abs(x - y).max(),
            "training/rollout_probs_diff_std": np.abs(x - y).std(),
            CORR: np.corrcoef(x, y)[0, 1],
        },
        rel=1e-9,
    )


def test_equal_log_probs_differ_by_nothing():
    rollout, _, mask = tokens(50)
    metrics = to_floats(rollout_diff_metrics(rollout_diff_sums(rollout, rollout.clone(), mask)))
    assert metrics["training/rollout_probs_diff_max"] == metrics["training/rollout_probs_diff_std"] == 0.0
    assert metrics[CORR] == pytest.approx(1.0, abs=1e-12)


def test_a_nan_log_prob_of_a_sampled_token_shows():
    old = torch.tensor([0.0, math.nan])
    metrics = to_floats(rollout_diff_metrics(rollout_diff_sums(torch.zeros(2), old, torch.ones(2))))
    assert math.isnan(metrics["training/rollout_probs_diff_mean"])


def test_without_tokens_only_valid_says_so():
    nothing = rollout_diff_sums(torch.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    assert rollout_diff_metrics(nothing) == {"training/rollout_probs_diff_valid": 0.0}


def test_constant_probabilities_have_no_correlation():
    metrics = rollout_diff_metrics(rollout_diff_sums(torch.full((4,), -1.0), -torch.arange(4.0), torch.ones(4)))
    assert CORR not in metrics


def test_other_metrics_pass_through():
    loss = Metric(1.0, "mean")
    assert rollout_diff_metrics({"actor/pg_loss": loss}) == {"actor/pg_loss": loss}
