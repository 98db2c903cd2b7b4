"""Rows of a batch -> one packed (THD) micro-batch, and per-token results back to rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from scalerl.protocol import DataProto, Jagged, cu_seqlens_of


@dataclass(frozen=True)
class MicroBatch:
    """T real tokens of some rows, end to end, and P >= T after alignment padding.

    input_ids, position_ids: [1, P] int64.  columns: name -> [T].  cu_seqlens: [num rows + 1] int64 of the real tokens.
    """

    rows: tuple[int, ...]
    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    columns: dict[str, Tensor]
    packed_seq_params: PackedSeqParams

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def num_padded_tokens(self) -> int:
        return self.input_ids.shape[1] - self.num_tokens


def pack(batch: DataProto, rows: Sequence[int], *, align: int, device: str) -> MicroBatch:
    """The rows as one sequence of sequences, its length a multiple of `align`.

    Alignment padding is a sequence of its own at the end, so it attends to nothing and nothing attends to it.
    """
    ids = batch.tokens["input_ids"].select(rows)
    lengths = ids.lengths.tolist()
    num_tokens = sum(lengths)
    padding = -num_tokens % align
    cu_seqlens = cu_seqlens_of(lengths)
    attended = cu_seqlens_of([*lengths, padding]) if padding else cu_seqlens
    position_ids = torch.cat([torch.arange(int(n)) for n in attended.diff()])
    cu_seqlens_i32 = attended.to(torch.int32).to(device)
    max_seqlen = max(*lengths, padding)
    return MicroBatch(
        rows=tuple(rows),
        input_ids=torch.cat([ids.values, torch.zeros(padding, dtype=torch.int64)])[None].to(device),
        position_ids=position_ids[None].to(device),
        cu_seqlens=cu_seqlens.to(device),
        columns={name: column.select(rows).values.to(device) for name, column in batch.tokens.items()},
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens_i32,
            cu_seqlens_kv=cu_seqlens_i32,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
        ),
    )


def unpack(num_rows: int, micro_batches: Sequence[MicroBatch], values: Sequence[Tensor]) -> Jagged:
    """values[i]: [T] of micro_batches[i] -> one row per row of the batch, in the batch's order."""
    rows: list[Tensor | None] = [None] * num_rows
    for micro_batch, values_T in zip(micro_batches, values, strict=True):
        bounds = micro_batch.cu_seqlens.tolist()
        for row, start, end in zip(micro_batch.rows, bounds, bounds[1:], strict=False):
            rows[row] = values_T[start:end].cpu()
    missing = [row for row, value in enumerate(rows) if value is None]
    assert not missing, f"rows {missing} are in no micro-batch"
    return Jagged.from_list(rows, rows[0].dtype)
