"""Weights of a rank's experts: how they are marked for megatron, named as in the family tables, and stored.

The only place that knows how they are kept inside a model, stacked or one by one; loading, weight sync and checkpoints
have the names of the tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor

from scalerl.parallel.layout import mark

# A parameter of a rank's experts: up to its layer's experts, of which weight, of which expert if it is of one.
_OF_EXPERTS = re.compile(r"(.*\.experts\.)(linear_fc[12]\.(?:weight|bias|\w+\.lora_[AB]))(\d*)")

_OF_ONE = re.compile(r"(.*\.experts\.)local_experts\.(\d+)\.(.*)")


def mark_of_experts(weight: Tensor, *, is_counted: bool = True) -> None:
    """Marks a weight of experts, so that megatron sums its gradient over its copies and counts it in the norm.

    is_counted: false on all but one of the expert-tensor-parallel ranks that hold the same numbers.
    """
    # Its copies are the expert data-parallel group's, whichever ranks share the rest of the layer.
    mark(weight, allreduce=False)
    # Every rank outside that group holds another part: the gradient norm counts all of them.
    mark(weight, tensor_model_parallel=is_counted, partition_dim=0, partition_stride=1)


def sharded_experts(key: str, weight: Tensor, first: int, groups: Any, sharded_offsets: tuple) -> ShardedTensorFactory:
    """The tensors that a checkpoint has of a weight of experts, a key for each expert.

    key: of the weight, `...experts.linear_fc1.weight` or `...linear_fc2.weight`, or `...bias`.  weight: [experts, rows,
    columns], or [rows, columns] of one; of biases [experts, rows].  first: global index of the first expert.  groups:
    megatron's of this rank.
    """
    etp, etp_rank = groups.expt_tp.size(), groups.expt_tp.rank()
    is_gate_up, is_bias = "linear_fc1" in key, key.endswith("bias")
    # (dimension, place, number of places): gate and up are two parts of one tensor, each split over etp.
    split: list[tuple[tuple[int, int, int], ...]] = [((1, etp_rank, etp),)]
    if is_gate_up:
        split = [((0, etp_rank, 2 * etp),), ((0, etp + etp_rank, 2 * etp),)]
    elif is_bias:
        split = [()]
    # Of several ranks with the same numbers the first saves them.
    copy = etp_rank if is_bias and not is_gate_up else 0

    def build(key: str, data: Tensor, replica_id: Any, flattened_range: None) -> list[ShardedTensor]:
        shards = []
        for expert, tensor in enumerate(data.view(-1, *data.shape[-1 if is_bias else -2 :]), first):
            expert_key = key.replace(".experts.", f".experts.local_experts.{expert}.", 1)
            for part, offsets in zip(tensor.chunk(len(split)), split, strict=True):
                shards.append(
                    ShardedTensor.from_rank_offsets(
                        expert_key,
                        part,
                        *sharded_offsets,
                        *offsets,
                        replica_id=replica_id,
                        prepend_axis_num=len(sharded_offsets),
                    )
                )
        return shards

    def merge(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts).view(weight.shape)

    # megatron's type of the two functions says less than it takes.
    build_fn: Any = build
    merge_fn: Any = merge
    return ShardedTensorFactory(key, weight, build_fn, merge_fn, (0, copy, groups.expt_dp.rank()))


def named_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every tensor that the family tables name, by its name in this model; of stacked experts the view of each one."""
    return _unstacked((name, parameter) for name, parameter in model.named_parameters()) | router_biases(model)


def stacked_name(name: str) -> tuple[str, int | None]:
    """The parameter that has the tensor of this name, as `named_tensors` names it, and its place there if stacked."""
    if (match := _OF_ONE.fullmatch(name)) is None:
        return name, None
    before, expert, weight = match.groups()
    return f"{before}{weight}", int(expert)


def router_biases(model: torch.nn.Module) -> dict[str, Tensor]:
    """The biases of the routers by name, which an update moves without a gradient."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(".expert_bias")}


def named_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """The gradients that megatron's data parallelism has gathered, by name as in `named_tensors`."""
    return _unstacked(
        (name, getattr(parameter, "main_grad"))  # noqa: B009
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )


def _unstacked(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    unstacked: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if (match := _OF_EXPERTS.fullmatch(name)) is None:
            unstacked[name] = tensor
            continue
        # Stacked, `linear_fc1.weight`, or Transformer Engine's of one expert, `linear_fc1.weight3`.
        before, weight, expert = match.groups()
        views = {int(expert): tensor.detach()} if expert else dict(enumerate(tensor.detach()))
        unstacked |= {f"{before}local_experts.{local}.{weight}": view for local, view in views.items()}
    return unstacked
