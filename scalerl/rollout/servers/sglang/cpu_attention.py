"""Causal attention of many sequences over a paged KV cache on a CPU, by few calls of torch's attention.

Sequences of similar length share a call, in which the shorter ones are padded. T: query tokens of all sequences,
H: query heads, K: key-value heads, D: head size, B: sequences of a call, Q, S: queries and keys of its longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Costs are measured in copied numbers. A call, with its setup, takes as long as copying this many (about 50
# microseconds), so padding that costs less is cheaper than another call.
CALL_COST = 1 << 17
# Largest number of keys in a call of several sequences; with as many values they stay in the cache of a core.
MAX_KEY_NUMBERS = 1 << 18
# Largest mask of a call, queries times keys.
MAX_MASK_NUMBERS = 1 << 21


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer; num_query_heads is a multiple of num_kv_heads."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int

    def cost(self, num_queries: int, num_keys: int) -> float:
        """Cost of one sequence: copying its keys and values, and multiplications at half the cost of a copy."""
        return self.head_dim * num_keys * (2 * self.num_kv_heads + 0.5 * self.num_query_heads * num_queries)


class _Piece(NamedTuple):
    """Consecutive queries of a sequence.  num_keys: number of keys that the last of them attends to."""

    sequence: int
    first_row: int
    num_queries: int
    num_keys: int


class AttentionCall:
    """One call of torch's attention for some sequences, usable in every layer with these heads."""

    def __init__(
        self, pieces: Sequence[_Piece], req_to_token: Tensor, req_pool_indices: Tensor, heads: Heads, causal: bool
    ) -> None:
        """Prepares the indices of a call.  causal: each piece has all queries of a sequence, from its first token."""
        self.heads, self.causal = heads, causal
        sequences, first_rows, num_queries, num_keys = torch.tensor(list(zip(*pieces, strict=True)))[:, :, None]
        self.shape = len(pieces), int(num_queries.max()), int(num_keys.max())
        keys, queries = torch.arange(self.shape[2]), torch.arange(self.shape[1])
        # Padding repeats a sequence's last key and query, because other slots of the cache may hold NaN.
        self.slots = req_to_token[req_pool_indices[sequences], keys.minimum(num_keys - 1)].flatten()
        query_rows = first_rows + queries.minimum(num_queries - 1)
        self.query_rows = query_rows.flatten()
        is_query = (queries < num_queries).flatten()
        self.unpadded = None if is_query.all() else is_query.nonzero()[:, 0]
        self.output_rows = self.query_rows if self.unpadded is None else self.query_rows[self.unpadded]
        # [B, Q] the last key that a query attends to.
        self._last_keys = num_keys - num_queries + queries.minimum(num_queries - 1)
        self._mask: Tensor | None = None
        self._needs_mask = not causal and not bool((self._last_keys == self.shape[2] - 1).all())

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """[B, 1, Q, S] mask: 0 where a query attends to a key, else minus infinity; None if it is not needed."""
        if not self._needs_mask or self._mask is not None:
            return self._mask
        hidden = torch.arange(self.shape[2]) > self._last_keys[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        if self.shape[1] == 1:
            # Such a mask is as small as the slots; larger ones are computed again in every layer.
            self._mask = mask
        return mask

    def attend(self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, scaling: float | None) -> None:
        """Attends, and writes its rows of `output`.

        query, output: [T, H, D].  k_cache, v_cache: [slots, K, D].  scaling: factor of scores; None is 1 / sqrt(D).
        """
        num_seqs, num_queries, num_keys = self.shape
        num_heads, num_kv_heads, head_dim = self.heads.num_query_heads, self.heads.num_kv_heads, self.heads.head_dim
        keys, values = (
            cache.index_select(0, self.slots)
            .to(query.dtype)
            .view(num_seqs, num_keys, num_kv_heads, head_dim)
            .transpose(1, 2)
            for cache in (k_cache, v_cache)
        )
        rows = query.index_select(0, self.query_rows)
        mask = self.mask(query.dtype)
        if num_queries == 1:
            # Query heads that share keys become rows of one product, which reads the keys once.
            rows = rows.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
            attended = scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
        else:
            rows = rows.view(num_seqs, num_queries, num_heads, head_dim).transpose(1, 2)
            attended = scaled_dot_product_attention(
                rows, keys, values, attn_mask=mask, is_causal=self.causal, scale=scaling, enable_gqa=True
            ).transpose(1, 2)
        attended = attended.reshape(num_seqs * num_queries, num_heads, head_dim)
        if self.unpadded is not None:
            attended = attended.index_select(0, self.unpadded)
        output.index_copy_(0, self.output_rows, attended)


def plan_calls(
    seq_lens: Tensor, query_lens: Tensor, req_to_token: Tensor, req_pool_indices: Tensor, heads: Heads
) -> list[AttentionCall]:
    """Plans the calls of a forward pass, for all its layers with these heads.

    seq_lens, query_lens: [sequences], tokens of each that have keys, and the number of its last ones that are queries;
    queries are end to end.  req_to_token: [requests, tokens] slots of the cache.  req_pool_indices: [sequences] rows.
    """
    from_start, after_prefix, first_row = [], [], 0
    for sequence, (num_keys, num_queries) in enumerate(zip(seq_lens.tolist(), query_lens.tolist(), strict=True)):
        piece = _Piece(sequence, first_row, num_queries, num_keys)
        first_row += num_queries
        if 1 < num_queries == num_keys:
            from_start.append(piece)
        elif num_queries * num_keys > MAX_MASK_NUMBERS:
            after_prefix += _cut(piece)
        elif num_queries and num_keys:
            after_prefix.append(piece)
    return [
        AttentionCall(pieces, req_to_token, req_pool_indices, heads, causal)
        # A sequence from its start needs no mask, as padding is after all queries.
        for causal, group in ((True, from_start), (False, after_prefix))
        for pieces in _alike(group, heads.cost, MAX_KEY_NUMBERS // (heads.num_kv_heads * heads.head_dim))
    ]


def _cut(piece: _Piece) -> Iterator[_Piece]:
    """Cuts a piece into parts with masks of at most MAX_MASK_NUMBERS, each with the keys that it attends to."""
    at_most = max(1, MAX_MASK_NUMBERS // piece.num_keys)
    for first in range(0, piece.num_queries, at_most):
        num_queries = min(at_most, piece.num_queries - first)
        num_keys = piece.num_keys - piece.num_queries + first + num_queries
        yield _Piece(piece.sequence, piece.first_row + first, num_queries, num_keys)


def _alike(pieces: Sequence[_Piece], cost: Callable[[int, int], float], max_keys: int) -> Iterator[list[_Piece]]:
    """Groups pieces, longest first, into calls until padding would cost more than another call, or keys are too many.

    So all padding costs at most as much as all calls.
    """
    alike: list[_Piece] = []
    longest_queries = longest_keys = 0
    # Cost of a piece as long as the longest queries and keys, and of all pieces without padding.
    padded_cost = needed_cost = 0.0
    # Longest first, so that no piece of a call has more queries than its first.
    for piece in sorted(pieces, key=itemgetter(2, 3), reverse=True):
        _, _, num_queries, num_keys = piece
        count = len(alike) + 1
        if num_keys == longest_keys and num_queries == longest_queries:
            piece_cost = padded_cost
        else:
            piece_cost = cost(num_queries, num_keys)
            if num_keys > longest_keys and alike:
                padded_cost = cost(longest_queries, num_keys)
        most_keys = max(longest_keys, num_keys)
        if alike and (
            count * padded_cost - needed_cost - piece_cost > CALL_COST
            or count * most_keys > max_keys
            or count * longest_queries * most_keys > MAX_MASK_NUMBERS
        ):
            yield alike
            alike = []
        if not alike:
            longest_queries, most_keys, padded_cost, needed_cost = num_queries, num_keys, piece_cost, 0.0
        alike.append(piece)
        longest_keys, needed_cost = most_keys, needed_cost + piece_cost
    if alike:
        yield alike
