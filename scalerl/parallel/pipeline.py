"""megatron's pipeline schedules over packed micro-batches, each of its own length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, _p2p_ops
from megatron.core.process_groups_config import ProcessGroupCollection

if TYPE_CHECKING:
    from scalerl.parallel.packing import MicroBatch


class _OrderedShapes(P2PCommunicator):
    """Exchanges shapes in the same order as tensors.

    Repairs megatron-core 0.16.1, whose order takes one direction's shape for the other's where the next stage is also
    the previous one: an interleaved pipeline of two stages.
    """

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        device = torch.cuda.current_device()

        def sent(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else torch.tensor(tensor.size(), device=device)

        def received(wanted: bool) -> torch.Tensor | None:
            return torch.empty(3, dtype=torch.int64, device=device) if wanted else None

        shape_prev, shape_next = received(recv_prev), received(recv_next)
        requests = _p2p_ops(
            tensor_send_prev=sent(tensor_send_prev),
            tensor_recv_prev=shape_prev,
            tensor_send_next=sent(tensor_send_next),
            tensor_recv_next=shape_next,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        for request in requests.values():
            request.wait()
        return tuple([0, 0, 0] if shape is None else shape.tolist() for shape in (shape_prev, shape_next))


def run_schedule(
    forward_step: Callable, chunks: list[torch.nn.Module], micro_batches: Sequence[MicroBatch], *, forward_only: bool
) -> list[Any]:
    """Forward, and backward unless forward_only, of all micro-batches through this stage's chunks.

    forward_step(iterator, chunk) -> (output, loss function). Returns what the loss function kept, on the last stage.
    """
    interleaved = {}
    if len(chunks) > 1:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        interleaved = {"p2p_communicator": _OrderedShapes(groups.pp, chunks[0].config), "pg_collection": groups}
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=chunks,
        num_microbatches=len(micro_batches),
        # With variable sequence lengths megatron ignores these two.
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        **interleaved,
    )
