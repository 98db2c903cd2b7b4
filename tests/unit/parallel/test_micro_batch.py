"""Rows -> packed micro-batch -> rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalerl.batch import Alignment
from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.parallel.micro_batch import MicroBatch, by_length, pack_rows, unpack

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
def packed_case(draw: st.DrawFn) -> tuple[list[int], list[list[int]], int, int]:
    """Lengths, a partition of the rows into micro-batches in any order, tp size, cp size."""
    lengths = draw(LENGTHS)
    order = draw(st.permutations(range(len(lengths))))
    cuts = sorted(draw(st.sets(st.integers(1, len(lengths)), max_size=3)) | {len(lengths)})
    starts = [0, *cuts[:-1]]
    parts = [list(order[start:end]) for start, end in zip(starts, cuts, strict=True)]
    return lengths, parts, draw(st.integers(1, 8)), draw(st.sampled_from([1, 2, 3, 4]))


Case = tuple[list[int], list[list[int]], int, int]


def packed_on_every_rank(batch: DataProto, rows: list[int], tp_size: int, cp_size: int) -> list[MicroBatch]:
    alignment = Alignment.of_layout(tp_size=tp_size, cp_size=cp_size, sequence_parallel=True)
    return [
        pack_rows(batch, rows, device="cpu", alignment=alignment, cp_size=cp_size, cp_rank=rank)
        for rank in range(cp_size)
    ]


@given(packed_case())
def test_unpack_undoes_pack(case: Case) -> None:
    lengths, micro_batches, tp_size, cp_size = case
    batch = batch_of(lengths)
    packed = [packed_on_every_rank(batch, rows, tp_size, cp_size)[0] for rows in micro_batches]
    for name, column in batch.tokens.items():
        back = unpack(len(batch), packed, [micro_batch.columns[name] for micro_batch in packed])
        assert torch.equal(back.values, column.values) and torch.equal(back.cu_seqlens, column.cu_seqlens)


def test_the_shortest_row_comes_first() -> None:
    assert by_length(batch_of([4, 2, 3, 2, 4]), [4, 3, 0, 1]) == [1, 3, 0, 4]


@given(packed_case())
def test_every_token_is_on_one_rank_and_padding_after_its_sequence(case: Case) -> None:
    lengths, micro_batches, tp_size, cp_size = case
    batch = batch_of(lengths)
    for rows in micro_batches:
        ranks = packed_on_every_rank(batch, rows, tp_size, cp_size)
        first = ranks[0]
        padded = list(first.packing.lengths)
        assert first.num_tokens == sum(lengths[row] for row in rows)
        assert sum(padded) == first.num_tokens + first.num_padded_tokens
        for micro_batch in ranks:
            assert micro_batch.input_ids.shape == micro_batch.position_ids.shape == (1, sum(padded) // cp_size)
            assert micro_batch.input_ids.shape[1] % tp_size == 0
        # What all ranks hold, back in packed order.
        order = first.packing.order if cp_size > 1 else torch.arange(sum(padded))
        ids, positions, labels = (torch.empty(sum(padded), dtype=torch.int64) for _ in range(3))
        ids[order] = torch.cat([micro_batch.input_ids[0] for micro_batch in ranks])
        positions[order] = torch.cat([micro_batch.position_ids[0] for micro_batch in ranks])
        labels[order] = torch.cat([micro_batch.labels for micro_batch in ranks])
        sequences = ids.split(padded)
        for row, sequence in zip(rows, sequences, strict=False):
            assert sequence[: lengths[row]].tolist() == batch.tokens["input_ids"].select([row]).values.tolist()
            assert (sequence[lengths[row] :] == 0).all()
        assert all((sequence == 0).all() for sequence in sequences[len(rows) :])
        assert positions.tolist() == [place for span in padded for place in range(span)]
        assert torch.equal(labels[:-1], ids[1:])
        params = first.packing
        assert params.qkv_format == "thd" and params.max_seqlen_q == params.max_seqlen_kv == max(padded)
        for cu_seqlens in (params.cu_seqlens_q, params.cu_seqlens_kv):
            assert cu_seqlens.dtype == torch.int32 and cu_seqlens.diff().tolist() == padded


@given(LENGTHS, st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_padding_is_what_the_layout_forces(lengths: list[int], tp_size: int, cp_size: int) -> None:
    padded = packed_on_every_rank(batch_of(lengths), list(range(len(lengths))), tp_size, cp_size)[0].packing.lengths
    piece = 2 * cp_size if cp_size > 1 else 1
    assert all(0 <= after - before < piece for before, after in zip(lengths, padded, strict=False))
    assert len(padded) <= len(lengths) + 1
    assert sum(padded) % (cp_size * tp_size) == 0
    assert sum(padded[len(lengths) :]) < math.lcm(piece, cp_size * tp_size)


def test_a_row_in_no_micro_batch() -> None:
    batch = batch_of([2, 3])
    packed = [pack_rows(batch, [1], device="cpu")]
    with pytest.raises(AssertionError, match=r"rows \[0\] are in no micro-batch"):
        unpack(2, packed, [packed[0].columns["advantages"]])


@given(packed_case())
def test_results_find_their_token(case: Case) -> None:
    """A result that every place makes about itself or about the next token ends at that token, on any layout."""
    lengths, micro_batches, tp_size, cp_size = case
    batch = batch_of(lengths)
    for rows in micro_batches:
        ranks = packed_on_every_rank(batch, rows, tp_size, cp_size)
        ids = batch.tokens["input_ids"].select(rows).values
        own = torch.cat([micro_batch.input_ids[0] for micro_batch in ranks])
        about_next = torch.cat([micro_batch.labels for micro_batch in ranks])
        for micro_batch in ranks:
            assert torch.equal(micro_batch.to_own_token(own), ids)
            about = micro_batch.to_described_token(about_next.float())
            assert torch.equal(about, ids.float().masked_fill(micro_batch.is_first, 0.0))


def test_results_about_tokens_pass_the_gradient() -> None:
    """Each result gets its token's weight; the last of a sequence is about no token and gets none."""
    packed = pack_rows(batch_of([2, 3]), [0, 1], device="cpu")
    values = torch.arange(5.0, requires_grad=True)
    (packed.to_described_token(values) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).sum().backward()
    assert values.grad.tolist() == [2.0, 0.0, 4.0, 5.0, 0.0]


def test_a_column_with_other_lengths_is_no_column_of_tokens() -> None:
    patches = Jagged.from_list([torch.full((row, 2), float(row)) for row in range(3)], torch.float32, per_token=False)
    packed = pack_rows(batch_of([2, 3, 4]).union(DataProto({"patches": patches})), [2, 0], device="cpu")
    assert packed.columns.keys() == {"input_ids", "advantages"}


@given(packed_case())
def test_what_predicts_a_token_gets_what_the_token_has(case: Case) -> None:
    lengths, micro_batches, tp_size, cp_size = case
    batch = batch_of(lengths)
    for rows in micro_batches:
        ranks = packed_on_every_rank(batch, rows, tp_size, cp_size)
        ids_T = ranks[0].columns["input_ids"]
        two_T2 = torch.stack([ids_T, -ids_T], -1).int()
        moved = torch.cat([part.to_predicting_token(two_T2, rank, cp_size) for rank, part in enumerate(ranks)])
        labels = torch.cat([part.labels for part in ranks])
        # Where a token is predicted it is the label; 0 elsewhere.
        predicts = moved[:, 0] != 0
        assert int(predicts.sum()) == int((~ranks[0].is_first).sum())
        assert torch.equal(moved[predicts][:, 0].long(), labels[predicts])
        back = ranks[0].to_described_token(moved)
        assert torch.equal(back, two_T2.masked_fill(ranks[0].is_first[:, None], 0))
