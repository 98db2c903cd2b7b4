"""Packs rows of a batch into (THD) micro-batches, runs them through the stages, and splits results into rows again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from scalerl.batch.alignment import NO_ALIGNMENT, Alignment
from scalerl.batch.data_proto import DataProto, Jagged, cu_seqlens_of
from scalerl.models.vision import VisionModel
from scalerl.parallel.pictures import Pictures, part_of, pictures_of_rows
from scalerl.parallel.ulysses import zigzag_order

if TYPE_CHECKING:
    from scalerl.parallel.moe_routing import Routing

Shape = list[int]


@dataclass
class Packing(PackedSeqParams):
    """megatron's description of a packed micro-batch, with what scalerl's attention and routers need in addition.

    lengths: of all packed sequences, padding included, on the host: reading cu_seqlens would wait for the device.
    order, natural: [P] `zigzag_order` and its inverse on the device; None without context parallelism.
    cos_sin: rotary tables [2, P / cp, head_dim / 2] float32 of this rank's tokens; the engine fills them in.
    routing: what the routers of a mixture need; the engine fills it in.
    pictures: those that this rank computes; None: none.
    """

    lengths: tuple[int, ...] = ()
    order: Tensor | None = None
    natural: Tensor | None = None
    cos_sin: Tensor | None = None
    routing: Routing | None = None
    pictures: Pictures | None = None

    @property
    def routed(self) -> Routing:
        """The routing record of this micro-batch, which `add_routing` must have set."""
        assert self.routing is not None
        return self.routing


@dataclass(frozen=True)
class MicroBatch:
    """T real tokens of some rows, end to end; P >= T tokens after alignment, of which this rank holds P / cp.

    input_ids: [1, P / cp] int64.  labels: [P / cp] int64, the next token of each.
    position_ids: [1, P / cp] int64, or with pictures [3, P / cp], in time, height and width.
    columns: name -> [T, ...] of the real tokens.  cu_seqlens: [num rows + 1] int64 of the real tokens.
    prediction_indices, token_indices: [T] int64, for each real token the index, in the cp ranks' results end to end, of
    the result about it and of the result at its own position.
    is_first: [T] bool, first token of its sequence: no result is about it.
    """

    rows: tuple[int, ...]
    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    columns: dict[str, Tensor]
    prediction_indices: Tensor
    token_indices: Tensor
    is_first: Tensor
    num_tokens: int
    num_padded_tokens: int
    packing: Packing

    def to_described_token(self, results_P: Tensor) -> Tensor:
        """Moves results that each token holds about the next one to that token: [T], 0 for first tokens.

        results_P: [P, ...], those of all cp ranks end to end.
        """
        is_first = self.is_first.view(-1, *(1 for _ in results_P.shape[1:]))
        return results_P[self.prediction_indices].masked_fill(is_first, 0)

    def to_predicting_token(self, values_T: Tensor, cp_rank: int, cp_size: int) -> Tensor:
        """Moves what each token [T, ...] has to the token that predicts it: [P / cp, ...] of this cp rank, else 0."""
        length = len(self.labels)
        # Nothing predicts a first token: what it has goes to a place past the end.
        places_T = self.prediction_indices.masked_fill(self.is_first, cp_size * length)
        values_P = values_T.new_zeros(cp_size * length + 1, *values_T.shape[1:]).index_copy(0, places_T, values_T)
        return values_P[cp_rank * length : (cp_rank + 1) * length]

    def to_own_token(self, results_P: Tensor) -> Tensor:
        """Selects the real tokens' results: [P] of all cp ranks end to end -> [T] in packed order."""
        return results_P[self.token_indices]


def by_length(batch: DataProto, rows: Sequence[int]) -> list[int]:
    """Some rows of a batch, the shortest first: neighbours of one length share an attention call on a CPU."""
    lengths = batch.tokens["input_ids"].lengths[list(rows)].tolist()
    return [row for _, row in sorted(zip(lengths, rows, strict=True))]


def pack_rows(
    batch: DataProto,
    rows: Sequence[int],
    *,
    device: str,
    alignment: Alignment = NO_ALIGNMENT,
    cp_size: int = 1,
    cp_rank: int = 0,
    vision: VisionModel | None = None,
    sp: tuple[int, int] = (0, 1),
) -> MicroBatch:
    """Packs rows end to end, aligned as the layout needs, and takes this cp rank's part of the tokens.

    Padding after a sequence is seen by none of its tokens; padding that makes the whole divisible is one more sequence.
    vision: the tower that sees the rows' pictures.  sp: (rank, size) of the tp ranks that share this part's tokens.
    """
    ids = batch.tokens["input_ids"].select(rows)
    lengths = ids.lengths.tolist()
    padded = _padded(lengths, alignment)
    cu_seqlens, cu_padded = cu_seqlens_of(lengths), cu_seqlens_of(padded)
    num_tokens, total = sum(lengths), sum(padded)
    starts = cu_padded[: len(lengths)]
    # [T] indices of the real tokens among the P.
    token_indices = torch.arange(num_tokens) + (starts - cu_seqlens[:-1]).repeat_interleave(ids.lengths)
    packed_ids = torch.zeros(total, dtype=torch.int64)
    packed_ids[token_indices] = ids.values
    positions = (torch.arange(total) - cu_padded[:-1].repeat_interleave(cu_padded.diff()))[None]
    of_rows = pictures_of_rows(batch, rows, vision)
    feature_P = torch.full((total,), -1)
    if of_rows is not None:
        positions = positions.repeat(3, 1)
        positions[:, token_indices] = of_rows.positions_3T
        feature_P[token_indices] = of_rows.feature_T
    labels = packed_ids.roll(-1)
    is_first = torch.zeros(num_tokens, dtype=torch.bool)
    is_first[cu_seqlens[:-1]] = True
    prediction_indices = (token_indices - 1).clamp_min(0)
    order = natural = None
    if cp_size > 1:
        order = zigzag_order(tuple(padded), cp_size)
        natural = torch.empty_like(order)
        natural[order] = torch.arange(total)
        mine = order.view(cp_size, -1)[cp_rank]
        packed_ids, positions, labels = packed_ids[mine], positions[:, mine], labels[mine]
        feature_P = feature_P[mine]
        prediction_indices, token_indices = natural[prediction_indices], natural[token_indices]
        order, natural = order.to(device), natural.to(device)
    cu_padded_i32 = cu_padded.to(torch.int32).to(device)
    return MicroBatch(
        rows=tuple(rows),
        input_ids=packed_ids[None].to(device),
        position_ids=positions.to(device),
        labels=labels.to(device),
        cu_seqlens=cu_seqlens.to(device),
        columns={
            name: column.select(rows).values.to(device) for name, column in batch.tokens.items() if column.per_token
        },
        prediction_indices=prediction_indices.to(device),
        token_indices=token_indices.to(device),
        is_first=is_first.to(device),
        num_tokens=num_tokens,
        num_padded_tokens=total - num_tokens,
        packing=Packing(
            qkv_format="thd",
            cu_seqlens_q=cu_padded_i32,
            cu_seqlens_kv=cu_padded_i32,
            max_seqlen_q=max(padded),
            max_seqlen_kv=max(padded),
            lengths=tuple(padded),
            order=order,
            natural=natural,
            pictures=None if of_rows is None else part_of(of_rows, feature_P, device, sp),
        ),
    )


def _padded(lengths: list[int], alignment: Alignment) -> list[int]:
    """Tokens of each packed sequence with padding, and of one more sequence if the whole would not be divisible."""
    padded = alignment.of_sequences(np.array(lengths)).tolist()
    rest = alignment.of_micro_batch(sum(padded)) - sum(padded)
    return [*padded, rest] if rest else padded


def unpack(num_rows: int, micro_batches: Sequence[MicroBatch], values: Sequence[Tensor]) -> Jagged:
    """Splits per-token values into rows: values[i], [T] of micro_batches[i] -> the rows in the batch's order."""
    rows: list[Tensor | None] = [None] * num_rows
    for micro_batch, values_T in zip(micro_batches, values, strict=True):
        bounds = micro_batch.cu_seqlens.tolist()
        values_T = values_T.cpu()
        for row, start, end in zip(micro_batch.rows, bounds, bounds[1:], strict=False):
            rows[row] = values_T[start:end]
    missing = [row for row, values_T in enumerate(rows) if values_T is None]
    assert not missing, f"rows {missing} are in no micro-batch"
    complete = [values_T for values_T in rows if values_T is not None]
    return Jagged.from_list(complete, complete[0].dtype)


# --- megatron's pipeline schedules over micro-batches, each of its own length ---


class _KnownShapes(P2PCommunicator):
    """Tells megatron's schedule the shapes that a stage receives, which it knows: all pack the same micro-batches.

    megatron-core 0.19.2 would send shapes ahead of each tensor and wait for them, which costs two messages and a device
    synchronisation per tensor, and in an interleaved pipeline mixes up the two directions (two stages) or waits for
    ever (as many micro-batches as stages).
    """

    def __init__(self, group: Any, config: Any, forward: Iterator[Shape], backward: Iterator[Shape]) -> None:
        super().__init__(group, config)
        self._forward, self._backward = forward, backward

    def _communicate_shapes(self, _next: Any, _prev: Any, recv_prev: bool, recv_next: bool) -> tuple[Shape, Shape]:
        return next(self._forward) if recv_prev else [], next(self._backward) if recv_next else []


def run_schedule(
    forward_step: Callable, chunks: list[torch.nn.Module], micro_batches: Sequence[MicroBatch], *, forward_only: bool
) -> list[Any]:
    """Runs all micro-batches through this stage's chunks: forward and, unless forward_only, backward.

    forward_step(iterator, chunk) -> (output, loss function). Returns what the loss function kept, on the last stage.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    arguments = {}
    if groups.pp.size() > 1:
        config = chunks[0].config
        forward, backward = _received(micro_batches, len(chunks), config, groups.pp)
        arguments = {"p2p_communicator": _KnownShapes(groups.pp, config, forward, backward), "pg_collection": groups}
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks] if len(chunks) > 1 else iter(micro_batches),
        model=chunks,
        num_microbatches=len(micro_batches),
        # With variable sequence lengths megatron ignores these two.
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        **arguments,
    )


def _received(
    micro_batches: Sequence[MicroBatch], num_chunks: int, config: Any, pp_group: Any
) -> tuple[Iterator[Shape], Iterator[Shape]]:
    """Shapes of the activations and of the gradients that this stage receives, in the order of the schedule.

    A stage computes in the order of the schedule's table and receives in the order in which it computes; the first
    chunk of the first stage receives no activations, the last chunk of the last stage no gradients.
    """
    tp_size = config.tensor_model_parallel_size if config.sequence_parallel else 1
    shapes = [[batch.input_ids.shape[1] // tp_size, 1, config.hidden_size] for batch in micro_batches]
    table = get_schedule_table(len(micro_batches), num_chunks, config.microbatch_group_size_per_vp_stage)
    is_first, is_last = pp_group.rank() == 0, pp_group.rank() == pp_group.size() - 1
    forward = [shapes[number] for number, chunk in table if not (is_first and chunk == 0)]
    # Backward goes through the chunks from the last one, which the table counts as its first.
    backward = [shapes[number] for number, chunk in table if not (is_last and chunk == 0)]
    return iter(forward), iter(backward)
