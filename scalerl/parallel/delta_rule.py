"""The gated delta rule and the short convolution before it, over packed sequences (Gated Delta Networks, 2412.06464).

Each value head has a state S [dk, dv], 0 before a sequence's first token. A token with query q, key k, value v, decay
g <= 0 and strength b makes it S' = e^g S + k (b (v - e^g k S))^T, and its output is q S'.

Dims: P packed tokens, K key heads, R value heads of a key head, C tokens of a chunk, M chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens whose mutual influence is one triangular system; a state goes from chunk to chunk.
CHUNK = 64
_NORM_EPS = 1e-6


@cache
def _fla() -> Callable[..., Any] | None:
    """flash-linear-attention's kernels of this rule (CUDA only), or None where the package is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return chunk_gated_delta_rule


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    """Applies the rule to each sequence: query, key [P, K, dk], value [P, K * R, dv] -> outputs as value.

    decay: [P, K * R] float32, logarithms.  strength: [P, K * R] float32.  lengths: tokens of each packed sequence.
    Queries and keys are normed here, and queries scaled by dk ** -0.5. The state is float32.
    """
    if query.is_cuda and query.dtype != torch.float32 and (fla := _fla()) is not None:
        return _by_fla(fla, query, key, value, decay, strength, lengths)
    query, key = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + _NORM_EPS) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    out = _by_chunks(query, key, value.float(), decay.float(), strength.float(), lengths)
    return out.to(value.dtype)


def _by_fla(
    fla: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor,
    lengths: tuple[int, ...],
) -> Tensor:
    """The same by fla's kernels (0.6.0), on a batch of one packed row. Older ones want as many key as value heads."""
    repeat = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(repeat, dim=1) for x in (query, key))
    ends = torch.tensor([0, *lengths]).cumsum(0).to(query.device)
    packed = (x[None] for x in (query, key, value, decay, strength.to(value.dtype)))
    out, _ = fla(*packed, cu_seqlens=ends, use_qk_l2norm_in_kernel=True)
    return out[0]


@lru_cache(maxsize=64)
def _chunks(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """The chunks of packed sequences: (tokens [M, C], place [P], counts).

    tokens: the packed position of each place in a chunk, P where a sequence has ended. place: of each packed token
    among the M * C. counts: chunks of each step: first the first chunk of every sequence, the longest first, then the
    second chunk of those that have one, and so on.
    """
    total = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    tokens, counts = [], []
    for first in range(0, max(lengths, default=0), CHUNK):
        rows = [row for row in longest_first if lengths[row] > first]
        counts.append(len(rows))
        for row in rows:
            positions = torch.arange(starts[row] + first, starts[row] + first + CHUNK)
            tokens.append(positions.where(positions < starts[row + 1], total))
    stacked = torch.stack(tokens)
    place = torch.empty(total + 1, dtype=torch.int64)
    place[stacked.flatten()] = torch.arange(stacked.numel())
    return stacked, place[:-1], tuple(counts)


def _by_chunks(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    """The rule in float32: inside all chunks at once, then a state from chunk to chunk of all sequences at once."""
    tokens, place, counts = _chunks(lengths)
    tokens, place = tokens.to(query.device), place.to(query.device)
    num_keys = key.shape[1]

    def chunked(x: Tensor) -> Tensor:
        """[P, K * r, ...] -> [M, K, r, C, ...], zeros where a sequence has ended."""
        padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, 1))[tokens]
        return padded.unflatten(2, (num_keys, -1)).movedim(1, 3)

    q, k, v, g, beta = (chunked(x) for x in (query, key, value, decay, strength))
    decayed = g.cumsum(-1)
    # From token j to token i >= j of a chunk: what is left of a state.
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    left = (decayed[..., :, None] - decayed[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    # What each token adds to the state, apart from what the state before the chunk contributes.
    system = beta[..., None] * (k @ k.mT) * left
    wanted = beta[..., None] * torch.cat([v, (decayed.exp()[..., None] * k).expand(*v.shape[:-1], -1)], dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    added, removed = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = (q @ k.mT) * left
    from_state = q * decayed.exp()[..., None]
    to_state = k * (decayed[..., -1:] - decayed).exp()[..., None]
    kept = decayed[..., -1, None, None].exp()
    outputs, state, first = [], None, 0
    for step, count in enumerate(counts):
        here = slice(first, first + count)
        first += count
        new, out = added[here], None
        if state is not None:
            state = state[:count]
            new = new - removed[here] @ state
            out = from_state[here] @ state
        inside = scores[here] @ new
        outputs.append(inside if out is None else out + inside)
        if step + 1 < len(counts):
            grown = to_state[here].mT @ new
            state = grown if state is None else kept[here] * state + grown
    return torch.cat(outputs).movedim(3, 1).flatten(2, 3).flatten(0, 1)[place]


@lru_cache(maxsize=64)
def _positions(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def causal_conv(channels: Tensor, weight: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """SiLU of each channel's convolution over its last tokens of the same sequence: [P, channels] in and out.

    weight: [channels, taps], the last tap is the token's own.
    """
    positions = _positions(lengths).to(channels.device)
    convolve = _compiled_convolve() if channels.is_cuda else _convolve
    return convolve(channels, weight, positions)


def _convolve(channels: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    numbers, weight = channels.float(), weight.float()
    out = numbers * weight[:, -1]
    for back in range(1, weight.shape[1]):
        earlier = F.pad(numbers, (0, 0, back, 0))[: len(numbers)]
        # Another sequence's tokens are not seen.
        out = out + earlier.masked_fill((positions < back)[:, None], 0.0) * weight[:, -1 - back]
    return F.silu(out).to(channels.dtype)


@lru_cache(maxsize=1)
def _compiled_convolve() -> Any:
    return torch.compile(_convolve, dynamic=True)
