"""Attention in batched calls is attention of each sequence by itself: a plain float64 loop is the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scalerl.rollout.servers.sglang import cpu_attention
from scalerl.rollout.servers.sglang.cpu_attention import AttentionCall, Heads, plan_calls

SCALING = 0.3


@dataclass
class Batch:
    """query_lens: how many tokens of each sequence are queries; the ones before them are its cached prefix."""

    heads: Heads
    seq_lens: list[int]
    query_lens: list[int]
    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    req_to_token: Tensor
    req_pool_indices: Tensor

    @classmethod
    def random(
        cls,
        heads: Heads,
        prefix_lens: list[int],
        query_lens: list[int],
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Batch:
        """Slots in any order, requests in any row, and NaN wherever nothing belongs to the batch."""
        draw = torch.Generator().manual_seed(seed)
        seq_lens = [prefix + new for prefix, new in zip(prefix_lens, query_lens, strict=True)]
        num_slots, num_requests = sum(seq_lens) + 7, len(seq_lens) + 3
        slots = torch.randperm(num_slots, generator=draw)
        rows = torch.randperm(num_requests, generator=draw)[: len(seq_lens)]
        caches = torch.full((2, num_slots, heads.num_kv_heads, heads.head_dim), math.nan)
        # The slot of tokens that are not there is a real one, of nobody's.
        req_to_token = torch.full((num_requests, max(seq_lens) + 2), int(slots[-1]), dtype=torch.int32)
        taken = 0
        for row, length in zip(rows.tolist(), seq_lens, strict=True):
            own = slots[taken : taken + length]
            req_to_token[row, :length] = own.int()
            shape = (2, length, heads.num_kv_heads, heads.head_dim)
            caches[:, own] = torch.randn(shape, generator=draw)
            taken += length
        query = torch.randn(sum(query_lens), heads.num_query_heads, heads.head_dim, generator=draw)
        k_cache, v_cache = caches.to(dtype)
        return cls(heads, seq_lens, query_lens, query.to(dtype), k_cache, v_cache, req_to_token, rows)

    def calls(self) -> list[AttentionCall]:
        lengths = torch.tensor(self.seq_lens), torch.tensor(self.query_lens, dtype=torch.int32)
        return plan_calls(*lengths, self.req_to_token, self.req_pool_indices, self.heads)

    def attend(self) -> Tensor:
        output = torch.full_like(self.query, math.nan)
        for call in self.calls():
            call.attend(self.query, output, self.k_cache, self.v_cache, SCALING)
        return output

    def expected(self) -> Tensor:
        """float64 [T, H, D]: one query of one head at a time."""
        group = self.heads.num_query_heads // self.heads.num_kv_heads
        expected, first = [], 0
        for row, length, count in zip(self.req_pool_indices.tolist(), self.seq_lens, self.query_lens, strict=True):
            slots = self.req_to_token[row, :length].long()
            keys, values = self.k_cache[slots].double(), self.v_cache[slots].double()
            for place, query in enumerate(self.query[first : first + count].double()):
                seen = length - count + place + 1
                for head in range(self.heads.num_query_heads):
                    weights = (SCALING * keys[:seen, head // group] @ query[head]).softmax(0)
                    expected.append(weights @ values[:seen, head // group])
            first += count
        return torch.stack(expected).view(self.query.shape)

    def check(self, atol: float = 2e-6) -> None:
        torch.testing.assert_close(self.attend().double(), self.expected(), atol=atol, rtol=0)


HEADS = [Heads(4, 2, 8), Heads(3, 3, 4), Heads(6, 1, 16), Heads(8, 2, 5)]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Decoding (one query each), prompts from their start, prompts after a cached prefix, and all of them at once."""
    kinds = {"decode": (st.integers(0, 40), st.just(1)), "start": (st.just(0), st.integers(1, 40)),
             "prefix": (st.integers(1, 40), st.integers(1, 12))}  # fmt: skip
    kinds["mixed"] = (st.integers(0, 40), st.integers(1, 40))
    prefix, new = kinds[draw(st.sampled_from(sorted(kinds)))]
    lengths = draw(st.lists(st.tuples(prefix, new), min_size=1, max_size=9))
    return Batch.random(
        draw(st.sampled_from(HEADS)), [p for p, _ in lengths], [n for _, n in lengths], seed=draw(st.integers(0, 99))
    )


@given(batches(), st.sampled_from([(1 << 17, 1 << 18, 1 << 21), (1, 1 << 18, 1 << 21), (1 << 30, 60, 1 << 21),
                                   (1 << 30, 1 << 18, 70), (1 << 30, 1 << 30, 1 << 30)]))  # fmt: skip
def test_batched_attention_is_that_of_each_sequence_by_itself(batch: Batch, limits: tuple[int, int, int]) -> None:
    """limits: as they are; no padding; few keys in a call; small masks; one call for everything."""
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in zip(("CALL_COST", "MAX_KEY_NUMBERS", "MAX_MASK_NUMBERS"), limits, strict=True):
            patch.setattr(cpu_attention, name, limit)
        batch.check()


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_bfloat16_is_as_near_as_its_numbers_are(heads: Heads) -> None:
    for prefix_lens, query_lens in (([9, 30, 17], [1, 1, 1]), ([0, 0], [20, 31]), ([5, 12], [9, 3])):
        batch = Batch.random(heads, prefix_lens, query_lens, torch.bfloat16)
        assert batch.attend().dtype == torch.bfloat16
        batch.check(atol=2e-2)


def test_a_cache_of_another_type_than_the_queries_is_converted() -> None:
    batch = Batch.random(HEADS[0], [9, 30], [1, 3], torch.bfloat16)
    batch.query = batch.query.float()
    batch.check()


def test_one_call_serves_every_layer_of_a_pass() -> None:
    first, second = (Batch.random(HEADS[0], [9, 30, 11], [1, 1, 1], seed=seed) for seed in (0, 1))
    second.req_to_token, second.req_pool_indices = first.req_to_token, first.req_pool_indices
    second.k_cache, second.v_cache = first.v_cache, first.k_cache
    calls = first.calls()
    for batch in (first, second):
        output = torch.full_like(batch.query, math.nan)
        for call in calls:
            call.attend(batch.query, output, batch.k_cache, batch.v_cache, SCALING)
        torch.testing.assert_close(output.double(), batch.expected(), atol=2e-6, rtol=0)


HEADS_OF_32 = Heads(4, 2, 32)


def shapes(prefix_lens: list[int], query_lens: list[int]) -> list[tuple[int, int, int]]:
    return [call.shape for call in Batch.random(HEADS_OF_32, prefix_lens, query_lens).calls()]


def test_sequences_of_about_one_length_share_a_call() -> None:
    assert shapes([31] * 64, [1] * 64) == [(64, 1, 32)]
    assert shapes(list(range(40, 60)), [1] * 20) == [(20, 1, 60)]
    assert shapes([0] * 8, [6, 5, 6, 6, 4, 6, 6, 6]) == [(8, 6, 6)]


def test_a_long_sequence_does_not_pad_short_ones() -> None:
    assert shapes([3999, *[31] * 40], [1] * 41) == [(1, 1, 4000), (40, 1, 32)]
    assert shapes([0] * 9, [500, *[8] * 8]) == [(1, 500, 500), (8, 8, 8)]


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=200))
def test_padding_costs_at_most_what_the_calls_do_and_a_call_has_bounded_keys(seq_lens: list[int]) -> None:
    pieces = [cpu_attention._Piece(number, number, 1, length) for number, length in enumerate(seq_lens)]
    buckets = list(cpu_attention._alike(pieces, HEADS_OF_32.cost, max_keys=4096))
    assert sorted(piece.sequence for bucket in buckets for piece in bucket) == list(range(len(seq_lens)))
    for bucket in buckets:
        longest = max(piece.num_keys for piece in bucket)
        padding = sum(HEADS_OF_32.cost(1, longest) - HEADS_OF_32.cost(1, piece.num_keys) for piece in bucket)
        assert padding <= cpu_attention.CALL_COST
        assert len(bucket) == 1 or len(bucket) * longest <= 4096


def test_the_mask_of_a_long_prompt_after_a_prefix_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "MAX_MASK_NUMBERS", 1000)
    call_shapes = shapes([300], [40])
    assert sum(num_queries for _, num_queries, _ in call_shapes) == 40
    assert all(num_queries * num_keys <= 1000 for _, num_queries, num_keys in call_shapes)
    # From its start a prompt needs no mask.
    batch = Batch.random(HEADS_OF_32, [0], [300])
    (call,) = batch.calls()
    assert call.mask(torch.float32) is None
