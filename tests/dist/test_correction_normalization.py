"""Batch-normalized importance weights over ranks equal those of all sequences in one place."""

from __future__ import annotations

import pytest
import torch

from scalerl.algorithms import Correction, correct, rollout_corr_metrics
from scalerl.config.schema import RolloutCorrectionConfig
from scalerl.tracking.metrics import merge_metrics, to_floats
from tests.dist.launch import run_ranks

# Tokens of the sequences on each rank; every second token of a sequence is sampled, so that one of 1 token has none.
LENGTHS = {"two": ((6, 3), (8, 2, 4)), "one has no sampled token": ((6, 3), (1,)), "one has no sequence": ((6, 3), ())}


def columns(lengths: tuple[int, ...], rank: int) -> tuple[torch.Tensor, ...]:
    """Log-ratios far apart between ranks: a rank's own mean is not the group's."""
    generator = torch.Generator().manual_seed(rank)
    size = sum(lengths)
    rollout = -torch.rand(size, generator=generator, dtype=torch.float64)
    old = rollout + 0.1 * torch.randn(size, generator=generator, dtype=torch.float64) - 0.5 * rank
    mask = torch.cat([torch.arange(length) % 2 == 1 for length in lengths] or [torch.zeros(0, dtype=torch.bool)])
    return rollout, old, mask, torch.tensor([0, *lengths]).cumsum(0)


def on_rank(shares: tuple[tuple[int, ...], ...], level: str) -> Correction:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    config = RolloutCorrectionConfig(rollout_is=level, rollout_is_batch_normalize=True)
    correction = correct(*columns(shares[dist.get_rank()], dist.get_rank()), config, group=dist.group.WORLD)
    dist.destroy_process_group()
    return correction


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", LENGTHS)
def test_mean_weight_is_that_of_all_ranks(name, level):
    shares = LENGTHS[name]
    parts = run_ranks(len(shares), on_rank, shares, level, timeout_s=120)
    given = [columns(lengths, rank) for rank, lengths in enumerate(shares)]
    tokens = [torch.cat(column) for column in list(zip(*given, strict=True))[:3]]
    whole = correct(
        *tokens,
        torch.tensor([0, *(length for lengths in shares for length in lengths)]).cumsum(0),
        RolloutCorrectionConfig(rollout_is=level, rollout_is_batch_normalize=True),
    )
    torch.testing.assert_close(torch.cat([part.weights_T for part in parts]), whole.weights_T, rtol=1e-6, atol=0)
    metrics = to_floats(rollout_corr_metrics(merge_metrics(part.metrics for part in parts)))
    assert metrics == pytest.approx(to_floats(rollout_corr_metrics(whole.metrics)), rel=1e-12)
