"""Rows -> packed micro-batch -> rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.parallel.logprobs import next_token_to_token
from scalerl.parallel.packing import pack, unpack
from scalerl.protocol import DataProto, Jagged

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def batch_of(lengths: list[int]) -> DataProto:
    """Token ids 100 * row + place + 1: none is 0, which fills the padding."""
    ids = [[100 * row + place + 1 for place in range(length)] for row, length in enumerate(lengths)]
    advantages = [[float(row)] * length for row, length in enumerate(lengths)]
    return DataProto(
        {
            "input_ids": Jagged.from_list(ids, torch.int64),
            "advantages": Jagged.from_list(advantages, torch.float32),
        }
    )


@st.composite
def packed_case(draw: st.DrawFn) -> tuple[list[int], list[list[int]], int]:
    """Lengths, a partition of the rows into micro-batches in any order, and the alignment."""
    lengths = draw(LENGTHS)
    order = draw(st.permutations(range(len(lengths))))
    cuts = sorted(draw(st.sets(st.integers(1, len(lengths)), max_size=3)) | {len(lengths)})
    starts = [0, *cuts[:-1]]
    return lengths, [list(order[start:end]) for start, end in zip(starts, cuts, strict=True)], draw(st.integers(1, 8))


@settings(deadline=None)
@given(packed_case())
def test_unpack_undoes_pack(case: tuple[list[int], list[list[int]], int]) -> None:
    lengths, micro_batches, align = case
    batch = batch_of(lengths)
    packed = [pack(batch, rows, align=align, device="cpu") for rows in micro_batches]
    for name, column in batch.tokens.items():
        back = unpack(len(batch), packed, [micro_batch.columns[name] for micro_batch in packed])
        assert torch.equal(back.values, column.values) and torch.equal(back.cu_seqlens, column.cu_seqlens)


@settings(deadline=None)
@given(packed_case())
def test_padding_is_a_sequence_of_its_own(case: tuple[list[int], list[list[int]], int]) -> None:
    lengths, micro_batches, align = case
    batch = batch_of(lengths)
    for rows in micro_batches:
        packed = pack(batch, rows, align=align, device="cpu")
        num_tokens = sum(lengths[row] for row in rows)
        assert packed.num_tokens == num_tokens
        assert 0 <= packed.num_padded_tokens < align
        assert packed.input_ids.shape == packed.position_ids.shape == (1, num_tokens + packed.num_padded_tokens)
        assert packed.input_ids.shape[1] % align == 0
        assert (packed.input_ids[0, :num_tokens] > 0).all() and (packed.input_ids[0, num_tokens:] == 0).all()
        # Positions start again at 0 in every sequence, the padding included.
        spans = [lengths[row] for row in rows] + ([packed.num_padded_tokens] if packed.num_padded_tokens else [])
        assert packed.position_ids[0].tolist() == [place for span in spans for place in range(span)]
        params = packed.packed_seq_params
        assert params.qkv_format == "thd"
        for cu_seqlens in (params.cu_seqlens_q, params.cu_seqlens_kv):
            assert cu_seqlens.dtype == torch.int32 and cu_seqlens.diff().tolist() == spans
        assert params.max_seqlen_q == params.max_seqlen_kv == max(spans)


def test_a_row_in_no_micro_batch() -> None:
    batch = batch_of([2, 3])
    packed = [pack(batch, [1], align=1, device="cpu")]
    with pytest.raises(AssertionError, match=r"rows \[0\] are in no micro-batch"):
        unpack(2, packed, [packed[0].columns["advantages"]])


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 5))
def test_next_token_to_token(lengths: list[int], padding: int) -> None:
    """Against a loop over sequences and places."""
    total = sum(lengths)
    values = torch.arange(1.0, total + padding + 1)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    expected = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        expected += [0.0] + [float(values[place - 1]) for place in range(start + 1, end)]
    assert next_token_to_token(values, cu_seqlens).tolist() == expected


def test_next_token_to_token_passes_the_gradient() -> None:
    """Each value gets its token's weight; the last of a sequence is about no token and gets none."""
    values = torch.arange(6.0, requires_grad=True)
    shifted = next_token_to_token(values, torch.tensor([0, 2, 5]))
    (shifted * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).sum().backward()
    assert values.grad.tolist() == [2.0, 0.0, 4.0, 5.0, 0.0, 0.0]
