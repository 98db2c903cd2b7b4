"""Generalized advantage estimation: an advantage for each token, from a critic's values.

Dims: S sequences, T tokens of prompts and responses end to end, R of them response tokens (mask not 0).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK_TOKENS = 1 << 16
_BAD_REWARD = "the reward function or reward model must return finite numbers"
_BAD_VALUE = "the critic has diverged; see critic/grad_norm and critic.optim.lr"


def gae(
    rewards_T: Tensor, values_T: Tensor, response_mask_T: Tensor, cu_seqlens: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the response tokens of each sequence.

    delta_t = r_t + gamma V_t' - V_t;  A_t = delta_t + gamma lam A_t';  R_t = A_t + V_t.
    t' is the sequence's next response token, whatever lies between (observations, tool output), with V_t' = A_t' = 0
    after the last one. What the columns hold at other tokens is ignored, NaN and rewards included.

    rewards_T, values_T: [T] float; values_T as from `MegatronEngine.values`: value of the state in which token t was
    chosen.
    response_mask_T: [T] bool or 0/1.  cu_seqlens: [S + 1] integers from 0 to T.  gamma, lam: in [0, 1].
    Returns (advantages [T], returns [T]) float32, 0 at other tokens, computed in float64, without gradient. Advantages
    are not whitened: `whiten_selected` does that, over a process group too.
    Raises ValueError for shapes that do not match, gamma or lam outside [0, 1], and a reward or value of a response
    token that is not finite.
    Source: GAE (arXiv 1506.02438) eq. 16, applied to the sequence without its masked tokens.
    """
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"algorithm.{name}={factor} must be in [0, 1]")
    _check_shapes(response_mask_T, cu_seqlens, {"rewards": rewards_T, "values": values_T})
    advantages_T, returns_T = (torch.zeros_like(values_T, dtype=torch.float32) for _ in range(2))
    for rows, tokens in _blocks(cu_seqlens):
        keep_T, cu_R = _response_tokens(response_mask_T[tokens], cu_seqlens[rows.start : rows.stop + 1])
        rewards_R, values_R = (column.detach()[tokens][keep_T].double() for column in (rewards_T, values_T))
        _check_finite("reward", rewards_R, cu_R, rows.start, _BAD_REWARD)
        _check_finite("value", values_R, cu_R, rows.start, _BAD_VALUE)
        advantages_R = _advantages(rewards_R, values_R, cu_R, gamma, lam)
        advantages_T[tokens][keep_T] = advantages_R.float()
        returns_T[tokens][keep_T] = (advantages_R + values_R).float()
    return advantages_T, returns_T


def rewards_at_last_token(scores_S: Tensor, response_mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Puts each sequence's score at its last response token; returns [T] float32, 0 at all other tokens.

    scores_S: [S] float.  response_mask_T, cu_seqlens: as `gae`.
    Raises ValueError for shapes that do not match and for a score that is not finite.
    """
    _check_shapes(response_mask_T, cu_seqlens, {})
    num_sequences = len(cu_seqlens) - 1
    if tuple(scores_S.shape) != (num_sequences,):
        raise ValueError(f"scores {tuple(scores_S.shape)} must be [number of sequences], here ({num_sequences},)")
    bad = torch.nonzero(~scores_S.isfinite())
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"score of sequence {row} is {scores_S[row].item()} ({len(bad)} of {num_sequences} are not finite): "
            f"{_BAD_REWARD}"
        )
    keep_T, cu_R = _response_tokens(response_mask_T, cu_seqlens)
    has_tokens_S = cu_R.diff() > 0
    last_S = keep_T.nonzero().squeeze(1)[cu_R[1:][has_tokens_S] - 1]
    rewards_T = torch.zeros(len(keep_T), dtype=torch.float32, device=keep_T.device)
    rewards_T[last_S] = scores_S.detach()[has_tokens_S].float()
    return rewards_T


def _check_shapes(response_mask_T: Tensor, cu_seqlens: Tensor, columns: dict[str, Tensor]) -> None:
    num_tokens = len(response_mask_T)
    for name, column in ({"response_mask": response_mask_T} | columns).items():
        if tuple(column.shape) != (num_tokens,):
            raise ValueError(f"{name} {tuple(column.shape)} must be [tokens], as response_mask: ({num_tokens},)")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) == 0 or int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != num_tokens:
        raise ValueError(f"cu_seqlens {cu_seqlens.tolist()} must go from 0 to the number of tokens, {num_tokens}")


def _blocks(cu_seqlens: Tensor) -> Iterator[tuple[slice, slice]]:
    """Splits the batch into (slice of sequences, slice of their tokens) of about _BLOCK_TOKENS tokens each.

    Blocks of this size stay in the processor's cache from one pass to the next.
    """
    bounds, start = cu_seqlens.tolist(), 0
    for stop in range(1, len(bounds)):
        if bounds[stop] - bounds[start] >= _BLOCK_TOKENS or stop == len(bounds) - 1:
            yield slice(start, stop), slice(bounds[start], bounds[stop])
            start = stop


def _response_tokens(response_mask_T: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The mask as [T] bool, and the [S + 1] int64 bounds of the sequences once other tokens are dropped."""
    keep_T = response_mask_T != 0
    before = torch.nn.functional.pad(keep_T.cumsum(0), (1, 0))
    return keep_T, before[(cu_seqlens - cu_seqlens[0]).long()]


def _check_finite(what: str, values_R: Tensor, cu_R: Tensor, first_row: int, cause: str) -> None:
    bad = torch.nonzero(~values_R.isfinite())
    if len(bad) == 0:
        return
    first = bad[0]
    row = int(torch.searchsorted(cu_R, first, right=True)) - 1
    raise ValueError(
        f"{what} of response token {int(first - cu_R[row])} of sequence {first_row + row} is {values_R[first].item()}: "
        f"{cause}"
    )


def _advantages(rewards_R: Tensor, values_R: Tensor, cu_R: Tensor, gamma: float, lam: float) -> Tensor:
    """[R] float64 advantages of sequences that consist of response tokens only."""
    # Tokens from here to the end of the sequence, this one included.
    remaining_R = cu_R[1:].repeat_interleave(cu_R.diff()) - torch.arange(len(values_R), device=values_R.device)
    next_values_R = torch.where(remaining_R > 1, values_R.roll(-1), 0.0)
    return _discounted_sums(rewards_R + gamma * next_values_R - values_R, remaining_R, gamma * lam)


def _discounted_sums(values_R: Tensor, remaining_R: Tensor, discount: float) -> Tensor:
    """[R] discounted sum of each token's and all later values of its sequence: sum_k discount^k * values_{t+k}.

    Works in place. Each pass doubles the number of tokens in a sum: log2(longest sequence) passes, not one per token.
    """
    longest = int(remaining_R.max()) if len(remaining_R) else 0
    reach, weight = 1, discount
    while reach < longest and weight > 0.0:
        ahead = torch.where(remaining_R[:-reach] > reach, values_R[reach:], 0.0)
        values_R[:-reach].add_(ahead, alpha=weight)
        reach, weight = 2 * reach, weight * weight
    return values_R
