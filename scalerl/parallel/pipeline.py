"""megatron's pipeline schedules over packed micro-batches, each of its own length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection

if TYPE_CHECKING:
    from scalerl.parallel.micro_batch import MicroBatch

Shape = list[int]


class _KnownShapes(P2PCommunicator):
    """Tells megatron's schedule the shapes that a stage receives, which it knows: all pack the same micro-batches.

    megatron-core 0.16.1 would send shapes ahead of each tensor and wait for them, which costs two messages and a device
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
