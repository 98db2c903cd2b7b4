"""Selection of a mini-batch's tokens by the covariance of advantage and log-prob, for clip_cov and kl_cov.

c_t = (A_t - mean A) (old_logprobs_t - mean old_logprobs), means over the loss tokens of the mini-batch over all ranks.
The log-probs are the old ones, which the ratio divides by. They are known before the first forward, so no extra pass
is needed, and neither the layout nor the split into micro-batches changes the choice.
Source: arXiv 2505.22617 section 4.1, which takes the log-probs of the update itself; in the first update of a step
both are equal.
Dims: T packed tokens, C candidates of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from scalerl.config.schema import PolicyLossConfig


def select_tokens(
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    keys_T: Tensor,
    config: PolicyLossConfig,
    num_loss_tokens: int,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Selects this rank's tokens of one mini-batch by their covariance c; returns [T] bool.

    kl_cov: the max(1, int(kl_cov_ratio * num_loss_tokens)) tokens of greatest c.
    clip_cov: of the tokens with clip_cov_lb < c < clip_cov_ub, the max(1, int(clip_cov_ratio * num_loss_tokens)) with
    the smallest keys, or all if there are fewer.

    mask_T: loss tokens.  keys_T: [T] int64 tie-breakers, pseudo-random and the same for a token on every layout
    (`token_keys`).  num_loss_tokens: loss tokens of the mini-batch over all ranks.
    group: data-parallel ranks, all of which must call, including a rank without tokens.
    """
    keep_T = mask_T != 0
    advantages, logprobs = advantages_T[keep_T].double(), old_logprobs_T[keep_T].double()
    sums = torch.stack([advantages.sum(), logprobs.sum()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    mean_advantage, mean_logprob = sums / max(num_loss_tokens, 1)
    covariance = (advantages - mean_advantage) * (logprobs - mean_logprob)
    if config.loss_mode == "kl_cov":
        count, ranking, candidate = _count(config.kl_cov_ratio, num_loss_tokens), covariance, covariance.isfinite()
    else:
        count = _count(config.clip_cov_ratio, num_loss_tokens)
        candidate = (covariance > config.clip_cov_lb) & (covariance < config.clip_cov_ub)
        ranking = torch.zeros_like(covariance)
    selected_T = torch.zeros_like(keep_T)
    positions = keep_T.nonzero().squeeze(1)[candidate]
    chosen = _best(ranking[candidate], keys_T[positions], count, group)
    selected_T[positions[chosen]] = True
    return selected_T


def token_keys(samples: list[tuple[int, ...]], cu_seqlens: Tensor) -> Tensor:
    """Hashes the numbers that identify a sample and a token's position in it: [T] int64 in [0, 2^62).

    samples: [S] numbers that identify each sample, the same on every layout.  cu_seqlens: [S + 1].
    """
    lengths_S = cu_seqlens.diff()
    names_S = torch.tensor([_mix_numbers(numbers) for numbers in samples], dtype=torch.int64)
    positions_T = torch.arange(int(cu_seqlens[-1])) - cu_seqlens[:-1].repeat_interleave(lengths_S)
    return _mix(names_S.repeat_interleave(lengths_S) + positions_T * _ODD) & _POSITIVE


def _count(ratio: float, num_tokens: int) -> int:
    return max(1, int(ratio * num_tokens))


def _best(ranking_C: Tensor, keys_C: Tensor, count: int, group: dist.ProcessGroup | None) -> Tensor:
    """Indices of this rank's candidates that are among the `count` of all ranks with the greatest (ranking, -key)."""
    order = _order(ranking_C, keys_C)[:count]
    if group is None or dist.get_world_size(group) == 1:
        return order
    # No rank can have more than `count` of the winners.
    ranking = torch.full((count,), -torch.inf, dtype=torch.float64, device=ranking_C.device)
    keys = torch.full((count,), torch.iinfo(torch.int64).max, dtype=torch.int64, device=ranking_C.device)
    ranking[: len(order)], keys[: len(order)] = ranking_C[order], keys_C[order]
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    all_ranking, all_keys = (
        [torch.empty_like(ranking) for _ in range(size)],
        [torch.empty_like(keys) for _ in range(size)],
    )
    dist.all_gather(all_ranking, ranking, group=group)
    dist.all_gather(all_keys, keys, group=group)
    winners = _order(torch.cat(all_ranking), torch.cat(all_keys))[:count]
    mine = winners[(winners >= rank * count) & (winners < rank * count + len(order))] - rank * count
    return order[mine]


def _order(ranking: Tensor, keys: Tensor) -> Tensor:
    """Indices sorted by descending ranking, then by ascending key."""
    by_key = keys.argsort(stable=True)
    return by_key[ranking[by_key].argsort(descending=True, stable=True)]


# 64-bit finalizer of SplitMix64; multiplications wrap around.
_ODD = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_POSITIVE = 2**62 - 1


def _mix(values: Tensor) -> Tensor:
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        values = (values ^ (values >> shift)) * factor
    return values ^ (values >> 31)


def _mix_numbers(numbers: tuple[int, ...]) -> int:
    state = torch.zeros((), dtype=torch.int64)
    for number in numbers:
        state = _mix(state * _ODD + int(number) + 1)
    return int(state)
