"""Importance weights of sampled tokens from log(p_trainer / p_sampler), in log space. S sequences, N tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scalerl.algorithms.sequences import Sequences


def aggregate_log_ratio(log_ratio_N: Tensor, sequences: Sequences, level: str) -> Tensor:
    """Log of the importance ratio of each unit: [N] for `token`, [S] for `sequence` (sum) and `geometric` (mean).

    Source: token: https://fengyao.notion.site/off-policy-rl ; sequence, geometric: https://richardli.xyz/rl-collapse
    Raises ValueError for another level.
    """
    if level == "token":
        return log_ratio_N
    if level == "sequence":
        return sequences.sum(log_ratio_N)
    if level == "geometric":
        return sequences.mean(log_ratio_N)
    raise ValueError(f"rollout_is={level!r}: no such level; known are token, sequence, geometric")


def truncated_weights(log_ratio: Tensor, upper: float) -> Tensor:
    """Truncated importance weights (TIS): min(exp(log_ratio), upper), of any shape; they never overflow.

    Source: truncated importance sampling, Ionides 2008 (doi 10.1198/106186008X320456); for RL with a separate sampler:
    https://fengyao.notion.site/off-policy-rl
    """
    return log_ratio.clamp(max=math.log(upper)).exp()


def masked_weights(log_ratio: Tensor, lower: float, upper: float) -> Tensor:
    """Masked importance weights (MIS; of tokens: IcePop): exp(log_ratio) inside [lower, upper], 0 outside, any shape.

    Source: MIS: https://richardli.xyz/rl-collapse ; IcePop, usually with [0.5, 5]: arXiv 2510.18855.
    """
    outside = (log_ratio < math.log(lower)) | (log_ratio > math.log(upper))
    return torch.where(outside, 0.0, torch.where(outside, 0.0, log_ratio).exp())
