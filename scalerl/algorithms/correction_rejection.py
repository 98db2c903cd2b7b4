"""Tests that reject tokens and responses whose log-probs differ too much between sampler and trainer.

Dims: S sequences, N sampled tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scalerl.algorithms.sequences import Sequences
from scalerl.config.correction import Bounds

# Above this log-ratio k3 stays at e^20 - 21 = 4.9e8, so that sums of it are finite.
K3_LOG_RATIO_BOUND = 20.0


def divergence(log_ratio_N: Tensor, kind: str) -> Tensor:
    """[N] per-token estimate of KL(sampler || trainer).  d = log_ratio.

    k1: -d.  k2: d^2 / 2.  k3: exp(d) - 1 - d with d at most 20.
    Raises ValueError for another kind.  Source: J. Schulman, http://joschu.net/blog/kl-approx.html
    """
    if kind == "k1":
        return -log_ratio_N
    if kind == "k2":
        return 0.5 * log_ratio_N.square()
    if kind == "k3":
        bounded_N = log_ratio_N.clamp(max=K3_LOG_RATIO_BOUND)
        # expm1 keeps the digits that exp(d) - 1 - d loses for small d.
        return torch.expm1(bounded_N) - bounded_N
    raise ValueError(f"divergence {kind!r}: known are k1, k2, k3")


def rejection_statistic(log_ratio_N: Tensor, sequences: Sequences, option: str) -> Tensor:
    """The statistic that a rollout_rs test compares with its bounds.

    token_* options: [N] `divergence` of the kind that the option's name ends in.  seq_sum_*, seq_mean_*, seq_max_*:
    [S] its sum, mean or largest value over the sampled tokens of each sequence.
    """
    level, _, kind = option.rpartition("_")
    values_N = divergence(log_ratio_N, kind)
    if level == "token":
        return values_N
    return {"seq_sum": sequences.sum, "seq_mean": sequences.mean, "seq_max": sequences.max}[level](values_N)


def outside_bounds(statistic: Tensor, option: str, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Marks the values that are outside the bounds: (too low, too high), bool, shaped as `statistic`; NaN is neither.

    k1: the ratio exp(-statistic) = p_trainer / p_sampler is below the lower or above the upper bound (verl bounds the
    inverse).  k2, k3: never too low.
    seq_sum_k1 is the test by sequence ratio, seq_mean_k1 the one by geometric mean.
    Source: https://richardli.xyz/rl-collapse
    """
    lower, upper = bounds
    if option.endswith("k1"):
        assert lower is not None
        return -statistic < math.log(lower), -statistic > math.log(upper)
    return torch.zeros_like(statistic, dtype=torch.bool), statistic > upper
