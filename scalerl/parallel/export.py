"""This layout's parameters -> full HF tensors in a static order, bucket by bucket, on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from scalerl.families import Family, ModelShape, Param, padded_vocab_size
from scalerl.parallel.layout import Groups
from scalerl.parallel.loading import local_params
from scalerl.parallel.model import layers_of_stage


def plan_buckets(family: Family, shape: ModelShape, itemsize: int, bucket_bytes: int) -> list[list[Param]]:
    """The same on every rank: parameters in table order, cut where a bucket would pass bucket_bytes; none is empty."""
    buckets: list[list[Param]] = [[]]
    filled = 0
    for param in family.params(shape):
        num_bytes = itemsize * sum(math.prod(size) for size in param.hf_shapes(shape).values())
        if buckets[-1] and filled + num_bytes > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += num_bytes
    return buckets


@torch.no_grad()
def export_buckets(
    model: torch.nn.Module, family: Family, shape: ModelShape, groups: Groups, *, bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Collective over tp and pp: every rank must consume all buckets. Yields lists of (HF name, full tensor)."""
    parameters = dict(model.named_parameters())
    names = {param.name: name for param, name in local_params(family, shape, groups)}
    example = next(iter(parameters.values()))
    for bucket in plan_buckets(family, shape, example.element_size(), bucket_bytes):
        tensors: list[tuple[str, Tensor]] = []
        for param in bucket:
            full = _gather(param, parameters.get(names.get(param.name, "")), example, shape, groups)
            tensors.extend(param.to_hf(full, shape).items())
        yield tensors


def _gather(param: Param, local: Tensor | None, example: Tensor, shape: ModelShape, groups: Groups) -> Tensor:
    """The joined tensor on every rank: all-gather over tp on the stage that owns it, then broadcast over pp."""
    owner = _owner_stage(param, shape, groups)
    tp_size, pp_size = groups.layout.tp_size, groups.layout.pp_size
    if groups.at.pp_rank == owner:
        assert local is not None, f"{param.name} is not on stage {owner}"
        shards = [local.detach()]
        if tp_size > 1 and param.kind != "replicated":
            shards = [torch.empty_like(local) for _ in range(tp_size)]
            dist.all_gather(shards, local.detach().contiguous(), group=groups.tp)
        elif param.kind == "replicated":
            shards = [local.detach()] * tp_size
        full = param.join(shards, shape).contiguous()
    else:
        full = example.new_empty(param.joined_shape(shape, padded_vocab_size(shape.vocab_size, tp_size)))
    if pp_size > 1:
        dist.broadcast(full, src=dist.get_global_rank(groups.pp, owner), group=groups.pp)
    return full


def _owner_stage(param: Param, shape: ModelShape, groups: Groups) -> int:
    if param.layer is not None:
        return param.layer // len(layers_of_stage(shape.num_layers, groups))
    return 0 if param.stage_part == "first" else groups.layout.pp_size - 1
