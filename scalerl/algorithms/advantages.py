"""Advantages from one score per sample (outcome rewards).

Dims: S samples, G groups (samples of one prompt).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from scalerl.algorithms.registry import Registry
from scalerl.config.schema import AlgorithmConfig

AdvantageEstimator = Callable[[Tensor, np.ndarray, AlgorithmConfig], Tensor]

_REGISTRY: Registry[AdvantageEstimator] = Registry("advantage estimator", "algorithm.adv_estimator")
register_adv_est = _REGISTRY.register
get_adv_estimator = _REGISTRY.get
adv_estimator_names = _REGISTRY.names

GRPO_EPS = 1e-6


@register_adv_est("grpo")
def grpo(scores_S: Tensor, uids_S: np.ndarray, config: AlgorithmConfig) -> Tensor:
    """A = (s - mean_g) / (std_g + 1e-6), std unbiased; without `norm_adv_by_std_in_grpo`: A = s - mean_g (Dr.GRPO).

    scores_S: [S] float, one score per sample.  uids_S: [S], equal for the samples of one prompt, in any order.
    A group of one has no statistics: mean 0 and std 1 are taken, so A = s / (1 + 1e-6), or s for Dr.GRPO.
    Returns [S] float32; exactly 0 where all scores of a group of two or more are equal.
    Raises ValueError for a score that is not finite.
    Source: DeepSeekMath (arXiv 2402.03300) section 4.1.2; Dr.GRPO (arXiv 2503.20783) section 3.2.
    """
    centred_S, counts_S, groups_S = _centre_by_group(scores_S, uids_S)
    if not config.norm_adv_by_std_in_grpo:
        return centred_S.float()
    squares_G = torch.zeros(int(groups_S.max()) + 1 if len(groups_S) else 0, dtype=torch.float64)
    squares_G.index_add_(0, groups_S, centred_S.square())
    std_S = (squares_G[groups_S] / (counts_S - 1).clamp(min=1)).sqrt()
    std_S = torch.where(counts_S > 1, std_S, torch.ones_like(std_S))
    return (centred_S / (std_S + GRPO_EPS)).float()


@register_adv_est("rloo")
def rloo(scores_S: Tensor, uids_S: np.ndarray, config: AlgorithmConfig) -> Tensor:
    """A = s - mean of the other scores of the group = (s - mean_g) * n / (n - 1).  A group of one: A = s.

    Shapes and errors as `grpo`.  Source: RLOO (arXiv 2402.14740) section 2.2.
    """
    centred_S, counts_S, _ = _centre_by_group(scores_S, uids_S)
    scale_S = torch.where(counts_S > 1, counts_S / (counts_S - 1).clamp(min=1), torch.ones_like(centred_S))
    return (centred_S * scale_S).float()


def _centre_by_group(scores_S: Tensor, uids_S: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """(scores less their group's mean [S] float64, group sizes [S] int64, group numbers [S] int64).

    A group of one is left as it is.
    """
    uids_S = np.asarray(uids_S)
    if scores_S.ndim != 1 or uids_S.shape != tuple(scores_S.shape):
        raise ValueError(f"scores {tuple(scores_S.shape)} and uids {uids_S.shape} must both be [number of samples]")
    scores_S = scores_S.detach().cpu().double()
    bad = torch.nonzero(~scores_S.isfinite())
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"score of sample {row} (uid {uids_S[row]}) is {scores_S[row].item()} ({len(bad)} of {len(scores_S)} "
            "scores are not finite): the reward function must return a finite number"
        )
    groups_S = torch.from_numpy(np.unique(uids_S, return_inverse=True)[1].reshape(-1).astype(np.int64))
    counts_G = torch.bincount(groups_S)
    # The group's lowest score is taken off first, so that equal scores give a mean without rounding.
    lowest_G = torch.full((len(counts_G),), torch.inf, dtype=torch.float64)
    lowest_G.scatter_reduce_(0, groups_S, scores_S, reduce="amin")
    shifted_S = scores_S - lowest_G[groups_S]
    sums_G = torch.zeros(len(counts_G), dtype=torch.float64).index_add_(0, groups_S, shifted_S)
    centred_S = shifted_S - (sums_G / counts_G)[groups_S]
    counts_S = counts_G[groups_S]
    return torch.where(counts_S > 1, centred_S, scores_S), counts_S, groups_S
