"""Context parallelism: each sequence is split over the cp ranks, and attention swaps tokens for heads (Ulysses).

Outside attention a rank holds a part of the tokens of every sequence and all its heads; inside, all tokens and a part
of the heads. DeepSpeed-Ulysses (arXiv 2309.14509) over packed sequences, with the zig-zag placement of ring attention.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@lru_cache(maxsize=64)
def zigzag_order(lengths: tuple[int, ...], cp_size: int) -> Tensor:
    """[P] int64: packed positions in the order in which cp ranks hold them, rank 0's P / cp_size first.

    lengths: tokens of each sequence, multiples of 2 * cp_size. A sequence is cut into 2 * cp_size pieces; rank r holds
    pieces r and 2 * cp_size - 1 - r, so that causal attention gives every rank the same work.
    """
    pieces: list[list[Tensor]] = [[] for _ in range(cp_size)]
    start = 0
    for length in lengths:
        if length % (2 * cp_size):
            raise ValueError(f"a sequence of {length} tokens cannot be cut into 2 * {cp_size} equal pieces")
        cut = torch.arange(start, start + length).view(2 * cp_size, -1)
        for rank in range(cp_size):
            pieces[rank] += [cut[rank], cut[2 * cp_size - 1 - rank]]
        start += length
    return torch.cat([piece for rank_pieces in pieces for piece in rank_pieces])


class _AllToAll(torch.autograd.Function):
    """Exchanges slices of [cp, ...]: slice i goes to rank i of the group, and what rank i sent here replaces it."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad, ctx.group), None


def heads_to_tokens(query: Tensor, key: Tensor, value: Tensor, natural_P: Tensor, group: dist.ProcessGroup) -> tuple:
    """Exchanges all heads of this rank's tokens for this rank's heads of all tokens, in packed order.

    query [P / cp, h, d], key [P / cp, kv, d], value [P / cp, kv, dv].  natural_P: inverse of `zigzag_order`.
    Returns [P, h / cp, d], [P, kv', d], [P, kv', dv], kv' = max(1, kv / cp) where that is whole; key and value heads
    are repeated as often as cp ranks need one of their own.
    """
    cp_size = group.size()
    repeat = math.lcm(key.shape[1], cp_size) // key.shape[1]
    if repeat > 1:
        key, value = (tensor.repeat_interleave(repeat, dim=1) for tensor in (key, value))
    if value.shape[2] != query.shape[2]:
        # With latent attention values are narrower than keys.
        return tuple(gather_tokens(tensor, natural_P, group) for tensor in (query, key, value))
    # One exchange for all three: [t, cp, h / cp, d] each, joined over their heads.
    joined = torch.cat([tensor.unflatten(1, (cp_size, -1)) for tensor in (query, key, value)], dim=2)
    sizes = [tensor.shape[1] // cp_size for tensor in (query, key, value)]
    return gather_tokens(joined.flatten(1, 2), natural_P, group).split(sizes, dim=1)


def gather_tokens(values: Tensor, natural_P: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges all heads of this rank's tokens for its heads of all tokens: [P / cp, h, d] -> [P, h / cp, d]."""
    by_rank = values.unflatten(1, (group.size(), -1)).transpose(0, 1)
    return _AllToAll.apply(by_rank, group).flatten(0, 1)[natural_P]


def tokens_to_heads(output: Tensor, order_P: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges this rank's heads of all tokens for all heads of its tokens: [P, h / cp, d] -> [P / cp, h, d]."""
    by_rank = output[order_P].unflatten(0, (group.size(), -1))
    return _AllToAll.apply(by_rank, group).transpose(0, 1).flatten(1, 2)


class _GatherReplicated(torch.autograd.Function):
    """All-gather along dim 0 for a loss that every rank of the group computes: each keeps its own slice's gradient."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.size = group.rank(), group.size()
        parts = [torch.empty_like(local) for _ in range(ctx.size)]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.size)[ctx.rank], None


def gather_replicated(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers [N, ...] of every rank to [N * cp, ...] on every rank. The loss must then be the same on all ranks."""
    return local if group.size() == 1 else _GatherReplicated.apply(local, group)
