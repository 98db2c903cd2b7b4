"""What the routers of a mixture of experts need to know about a micro-batch, and what they record about it.

They know the row of each token and, for a replay, the experts to take; they record experts, losses and how often they
would have chosen what they replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scalerl.batch.data_proto import Jagged
from scalerl.models import ModelShape
from scalerl.models.routing import RoutingShape, unknown_number
from scalerl.parallel.layout import Groups
from scalerl.parallel.micro_batch import MicroBatch, unpack

# Losses of the routers -> the field of megatron's configuration with their coefficient.
LOSS_COEFFICIENTS = {"moe_aux_loss": "moe_aux_loss_coeff", "moe_z_loss": "moe_z_loss_coeff"}


@dataclass
class Routing:
    """What routers know and record about one micro-batch.

    rows: [t] int64, for each token of this cp rank its row of the micro-batch, -1 for padding.

    num_update_tokens: of all micro-batches and dp ranks of the update.
    replayed: layer -> [t / tp, k] experts to take, in host memory, the router's own where they are not known
    (`is_known`); of this rank's layers; None: all its own.
    recorded: layer -> [t / tp, k] experts that were taken; None: nothing is recorded.
    loss_sums: of this rank's layers and tokens, before the coefficients, by name of LOSS_COEFFICIENTS.
    replays: [2] of this rank's layers and tokens, how many experts were replayed, and how many of these the routers
    would have chosen; None: nothing was replayed in a pass with gradients.
    """

    rows: Tensor
    num_rows: int
    num_update_tokens: int
    replayed: dict[int, Tensor] | None = None
    recorded: dict[int, Tensor] | None = field(default=None)
    loss_sums: dict[str, Tensor] = field(default_factory=dict)
    replays: Tensor | None = None

    def add_loss(self, name: str, loss: Tensor) -> Tensor:
        """Adds a loss, summed over tokens, to `loss_sums`; returns it unchanged."""
        loss_sum = loss.detach().double()
        self.loss_sums[name] = self.loss_sums[name] + loss_sum if name in self.loss_sums else loss_sum
        return loss

    @torch.no_grad()
    def count_replays(self, own_TK: Tensor, replayed_TK: Tensor, known_T: Tensor) -> None:
        """Adds a layer's tokens to `replays`.  own_TK: what the router would have chosen."""
        agreed_TK = (own_TK[:, None, :] == replayed_TK[:, :, None]).any(-1) & known_T[:, None]
        counts = torch.stack([known_T.sum() * own_TK.shape[1], agreed_TK.sum()])
        self.replays = counts if self.replays is None else self.replays + counts


def add_routing(
    batches: Sequence[MicroBatch],
    groups: Groups,
    *,
    routed_experts: Jagged | None = None,
    layers: Sequence[int] = (),
    sequence_parallel: bool = False,
    record: bool = False,
    with_losses: bool,
) -> None:
    """Fills in packing.routing of each micro-batch.

    routed_experts: what routers replay, [T, layers, k] of the shard; a rank keeps those of its tokens and layers.
    layers: of this rank, those with experts.

    Collective over dp if with_losses, which need the number of tokens of the whole update.
    """
    num_tokens = torch.tensor(sum(batch.num_tokens for batch in batches), device=batches[0].input_ids.device)
    if with_losses:
        dist.all_reduce(num_tokens, group=groups.dp)
    for batch in batches:
        lengths = batch.cu_seqlens.diff()
        rows_T = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        batch.packing.routing = Routing(
            rows=_of_cp_rank(batch, rows_T, groups, padding=-1),
            num_rows=len(lengths),
            num_update_tokens=int(num_tokens),
            recorded={} if record else None,
        )
        if routed_experts is not None:
            experts_TLK = routed_experts.select(batch.rows).values[:, list(layers)]
            mine = _of_cp_rank(batch, experts_TLK, groups, padding=unknown_number(experts_TLK.dtype))
            if sequence_parallel:
                mine = mine.chunk(groups.layout.tp_size)[groups.coordinates.tp_rank]
            # A layer's tokens end to end; they go to the device when that layer needs them.
            by_layer = mine.transpose(0, 1).contiguous()
            if batch.input_ids.is_cuda:
                by_layer = by_layer.pin_memory()
            batch.packing.routed.replayed = dict(zip(layers, by_layer, strict=True))


def _of_cp_rank(batch: MicroBatch, values_T: Tensor, groups: Groups, *, padding: int) -> Tensor:
    """Selects this cp rank's part of the real tokens' values, with a number for padding."""
    values_P = values_T.new_full((batch.num_tokens + batch.num_padded_tokens, *values_T.shape[1:]), padding)
    values_P[batch.token_indices.to(values_T.device)] = values_T
    return values_P.unflatten(0, (groups.layout.cp_size, -1))[groups.coordinates.cp_rank]


def recorded_experts(
    num_rows: int, batches: Sequence[MicroBatch], shape: ModelShape, groups: Groups, *, sequence_parallel: bool
) -> Jagged:
    """The column `routed_experts` of the shard after a forward pass; not known in layers of other pipeline stages.

    Collective over tp and cp.
    """
    columns, routing = [], RoutingShape.of(shape)
    for batch in batches:
        recorded = batch.packing.routed.recorded
        column_T = routing.unknown(batch.num_tokens).to(batch.input_ids.device)
        assert recorded is not None, "the pass did not record"
        for layer, experts_TK in sorted(recorded.items()):
            whole = _gathered(experts_TK, groups.tp) if sequence_parallel else experts_TK
            column_T[:, layer] = batch.to_own_token(_gathered(whole, groups.cp)).to(routing.dtype)
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


def routing_agreement(batches: Sequence[MicroBatch], groups: Groups) -> dict[str, float]:
    """The share of the replayed experts of an update that the routers would have chosen; {} without a replay.

    Collective over all ranks of the model.
    """
    routings = [batch.packing.routing for batch in batches]
    if any(routing is None or routing.replayed is None for routing in routings):
        return {}
    counts = torch.zeros(2, dtype=torch.float64, device=batches[0].input_ids.device)
    for routing in routings:
        # A stage may be without a mixture.
        if routing is not None and routing.replays is not None:
            counts += routing.replays
    for group in (groups.tp, groups.dp_cp, groups.pp):
        dist.all_reduce(counts, group=group)
    num_replayed, num_agreed = counts.tolist()
    return {"routing_agreement": num_agreed / num_replayed} if num_replayed else {}


def _gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts)
