"""What scalerl tells Transformer Engine's attention. The attention itself: tests/gpu/test_te_attention.py."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from scalerl.batch import Alignment
from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.config.transformer_engine import transformer_engine_version
from scalerl.parallel.attention import PackedAttention
from scalerl.parallel.micro_batch import Packing, pack_rows
from scalerl.parallel.model import core_attention
from scalerl.parallel.te_attention import transformer_engine_packing
from scalerl.parallel.ulysses import zigzag_order


def packing_of(lengths: list[int], cp_size: int, tp_size: int) -> Packing:
    ids = Jagged.from_list([torch.ones(length) for length in lengths], torch.int64)
    alignment = Alignment.of_layout(tp_size=tp_size, cp_size=cp_size, sequence_parallel=True)
    place = {"cp_size": cp_size, "cp_rank": cp_size - 1}
    batch = pack_rows(DataProto({"input_ids": ids}), range(len(lengths)), device="cpu", alignment=alignment, **place)
    return batch.packing


@pytest.mark.parametrize(
    ("lengths", "cp_size", "tp_size", "expected"),
    [
        ([9, 3, 16], 1, 1, [0, 9, 12, 28]),
        # Multiples of 2 * cp_size tokens each.
        ([9, 3, 16], 2, 1, [0, 12, 16, 32]),
        ([9, 3, 16], 4, 1, [0, 16, 24, 40]),
        # 20 tokens are no multiple of cp_size * tp_size: a sequence more.
        ([9, 5], 2, 4, [0, 12, 20, 24]),
    ],
)
def test_padding_belongs_to_its_sequence(lengths: list[int], cp_size: int, tp_size: int, expected: list[int]) -> None:
    told = transformer_engine_packing(packing_of(lengths, cp_size, tp_size))
    assert told.qkv_format == "thd"
    assert told.cu_seqlens_q.dtype == torch.int32
    assert told.cu_seqlens_q.tolist() == expected
    longest = max(end - start for start, end in pairwise(expected))
    # With context parallelism too these are lengths of whole sequences.
    assert told.max_seqlen_q == told.max_seqlen_kv == longest


def test_no_padding_between_sequences_is_said_without_asking_the_device() -> None:
    told = transformer_engine_packing(packing_of([9, 3], 2, 1))
    # One tensor: Transformer Engine takes equal but different ones for padding between sequences.
    assert told.cu_seqlens_q_padded is told.cu_seqlens_q
    assert told.cu_seqlens_kv_padded is told.cu_seqlens_kv
    assert told.cu_seqlens_kv is told.cu_seqlens_q
    assert told.pad_between_seqs is False
    # Those of the process stay: megatron's wrapper would put these in their place.
    assert told.cp_group is None and told.local_cp_size is None


def test_tokens_are_where_transformer_engine_looks_for_them() -> None:
    """The example in its documentation of context parallelism: sequences of 8 and 4 tokens over 2 ranks."""
    first, second = zigzag_order((8, 4), 2).view(2, -1).tolist()
    assert first == [0, 1, 6, 7, 8 + 0, 8 + 3]
    assert second == [2, 3, 4, 5, 8 + 1, 8 + 2]


def configured(comm_type: str | None) -> SimpleNamespace:
    return SimpleNamespace(cp_comm_type=comm_type, context_parallel_size=1, rotary_interleaved=False, no_rope_freq=None)


GROUPS = SimpleNamespace(cp=None, hierarchical_cp=())


def test_own_attention_unless_an_exchange_is_named() -> None:
    assert core_attention(configured(None), GROUPS).module is PackedAttention


@pytest.mark.skipif(transformer_engine_version() is not None, reason="transformer-engine is installed")
def test_an_absent_transformer_engine_is_refused_before_megatron_takes_its_stand_in() -> None:
    with pytest.raises(ImportError, match="transformer_engine"):
        core_attention(configured("a2a"), GROUPS)
