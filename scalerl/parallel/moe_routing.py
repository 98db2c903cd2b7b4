"""What the routers of a mixture of experts need to know about a micro-batch, and what they record about it.

They know the row of each token and, for a replay, the experts to take; they record experts and losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scalerl.batch.columns import ROUTED_EXPERTS
from scalerl.batch.data_proto import Jagged
from scalerl.models import ModelShape
from scalerl.parallel.layout import Groups
from scalerl.parallel.micro_batch import MicroBatch, unpack

# Losses of the routers -> the field of megatron's configuration with their coefficient.
LOSS_COEFFICIENTS = {"moe_aux_loss": "moe_aux_loss_coeff", "moe_z_loss": "moe_z_loss_coeff"}


@dataclass
class Routing:
    """What routers know and record about one micro-batch.

    rows: [t] int64, for each token of this cp rank its row of the micro-batch, -1 for padding.

    num_update_tokens: of all micro-batches and dp ranks of the update.
    replayed: [t, layers, k] experts to take, -1: the router's own choice; None: all its own.
    recorded: layer -> [t / tp, k] experts that were taken; None: nothing is recorded.
    loss_sums: of this rank's layers and tokens, before the coefficients, by name of LOSS_COEFFICIENTS.
    """

    rows: Tensor
    num_rows: int
    num_update_tokens: int
    replayed: Tensor | None = None
    recorded: dict[int, Tensor] | None = field(default=None)
    loss_sums: dict[str, Tensor] = field(default_factory=dict)

    def add_loss(self, name: str, loss: Tensor) -> Tensor:
        """Adds a loss, summed over tokens, to `loss_sums`; returns it unchanged."""
        loss_sum = loss.detach().double()
        self.loss_sums[name] = self.loss_sums[name] + loss_sum if name in self.loss_sums else loss_sum
        return loss


def add_routing(batches: Sequence[MicroBatch], groups: Groups, *, record: bool = False, with_losses: bool) -> None:
    """Fills in packing.routing of each micro-batch; routers replay the column `routed_experts` if there is one.

    Collective over dp if with_losses, which need the number of tokens of the whole update.
    """
    num_tokens = torch.tensor(sum(batch.num_tokens for batch in batches), device=batches[0].input_ids.device)
    if with_losses:
        dist.all_reduce(num_tokens, group=groups.dp)
    for batch in batches:
        lengths = batch.cu_seqlens.diff()
        rows_T = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        routed_experts = batch.columns.get(ROUTED_EXPERTS.name)
        batch.packing.routing = Routing(
            rows=_of_cp_rank(batch, rows_T, groups),
            num_rows=len(lengths),
            num_update_tokens=int(num_tokens),
            replayed=None if routed_experts is None else _of_cp_rank(batch, routed_experts.long(), groups),
            recorded={} if record else None,
        )


def _of_cp_rank(batch: MicroBatch, values_T: Tensor, groups: Groups) -> Tensor:
    """Selects this cp rank's part of the real tokens' values, with -1 for padding."""
    values_P = values_T.new_full((batch.num_tokens + batch.num_padded_tokens, *values_T.shape[1:]), -1)
    values_P[batch.token_indices] = values_T
    return values_P.unflatten(0, (groups.layout.cp_size, -1))[groups.coordinates.cp_rank]


def recorded_experts(
    num_rows: int, batches: Sequence[MicroBatch], shape: ModelShape, groups: Groups, *, sequence_parallel: bool
) -> Jagged:
    """The column `routed_experts` of the shard after a forward pass; -1 in layers of other pipeline stages.

    Collective over tp and cp.
    """
    columns = []
    for batch in batches:
        recorded = batch.packing.routed.recorded
        column_T = batch.input_ids.new_full((batch.num_tokens, shape.num_layers, shape.num_experts_per_token), -1)
        assert recorded is not None, "the pass did not record"
        for layer, experts_TK in sorted(recorded.items()):
            whole = _gathered(experts_TK, groups.tp) if sequence_parallel else experts_TK
            column_T[:, layer] = batch.to_own_token(_gathered(whole, groups.cp))
        columns.append(column_T)
    return unpack(num_rows, batches, columns)


def router_losses(batches: Sequence[MicroBatch], shape: ModelShape, config: Any, groups: Groups) -> dict[str, float]:
    """The routers' losses before their coefficients: means over the tokens of the update and the layers with experts.

    A loss whose coefficient is 0 is left out.

    config: megatron's. Collective over all ranks of the model.
    """
    names = [name for name, coefficient in LOSS_COEFFICIENTS.items() if getattr(config, coefficient)]
    if not names:
        return {}
    sums = torch.zeros(len(names), dtype=torch.float64, device=batches[0].input_ids.device)
    for routing in (batch.packing.routed for batch in batches):
        for index, name in enumerate(names):
            # A stage may be without a mixture.
            sums[index] += routing.loss_sums.get(name, 0.0)
    # A mixture trains over tp with sequence parallelism alone, where each rank routes tokens of its own.
    for group in (groups.tp, groups.dp_cp, groups.pp):
        dist.all_reduce(sums, group=group)
    num_tokens = batches[0].packing.routed.num_update_tokens
    return dict(zip(names, (sums / (num_tokens * sum(shape.moe_layers))).tolist(), strict=True))


def _gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts)
