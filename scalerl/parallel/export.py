"""This layout's parameters -> full HF tensors in a static order, bucket by bucket.

`export_buckets` joins them on every rank by collectives. `BucketWriter` has each rank copy what it holds into memory
that all ranks see, so that every byte is copied once whatever the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from scalerl.families import Family, ModelShape, Param, padded_vocab_size
from scalerl.parallel.experts import named_tensors
from scalerl.parallel.layout import Groups
from scalerl.parallel.loading import local_params


def plan_buckets(family: Family, shape: ModelShape, itemsize: int, bucket_bytes: int) -> list[list[Param]]:
    """The same on every rank: parameters in table order, cut where a bucket would pass bucket_bytes; none is empty."""
    buckets: list[list[Param]] = [[]]
    filled = 0
    for param in family.params(shape):
        num_bytes = _hf_bytes(param, shape, itemsize)
        if buckets[-1] and filled + num_bytes > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += num_bytes
    return buckets


def largest_bytes(family: Family, shape: ModelShape, itemsize: int) -> int:
    """The smallest bucket_bytes that every parameter fits into."""
    return max(_hf_bytes(param, shape, itemsize) for param in family.params(shape))


def _hf_bytes(param: Param, shape: ModelShape, itemsize: int) -> int:
    return itemsize * sum(math.prod(size) for size in param.hf_shapes(shape).values())


@torch.no_grad()
def export_buckets(
    chunks: Sequence[torch.nn.Module], family: Family, shape: ModelShape, groups: Groups, *, bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Collective over tp, etp, ep, pp: every rank must consume all buckets. Yields lists of (HF name, full tensor)."""
    held = _held(chunks, family, shape, groups)
    example = next(chunks[0].parameters())
    for bucket in plan_buckets(family, shape, example.element_size(), bucket_bytes):
        exported: list[tuple[str, Tensor]] = []
        for param in bucket:
            full = _gather(param, held.get(param.name), example, shape, groups)
            exported.extend(param.to_hf(full, shape).items())
        yield exported


class BucketWriter:
    """tensors[bucket]: (HF name, shape, dtype) of what `write` writes; the same on every rank."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        family: Family,
        shape: ModelShape,
        groups: Groups,
        *,
        bucket_bytes: int,
    ) -> None:
        self._chunks, self._family, self._shape, self._groups = chunks, family, shape, groups
        dtype = next(chunks[0].parameters()).dtype
        self._buckets = plan_buckets(family, shape, dtype.itemsize, bucket_bytes)
        self._numbers = {param.name: number for number, param in enumerate(family.params(shape))}
        self.tensors = [
            [
                (name, torch.Size(size), torch.float32 if param.keeps_float32 else dtype)
                for param in bucket
                for name, size in param.hf_shapes(shape).items()
            ]
            for bucket in self._buckets
        ]

    @torch.no_grad()
    def write(self, bucket: int, out: Mapping[str, Tensor]) -> None:
        """This rank's part of the bucket's tensors into `out` (HF name -> whole tensor), which all ranks share.

        Of the ranks that hold the same part one writes it, each its share of the parameters.
        """
        held = _held(self._chunks, self._family, self._shape, self._groups)
        layout, at = self._groups.layout, self._groups.at
        for param in self._buckets[bucket]:
            if not self._is_mine(param):
                continue
            rank, size = (at.etp_rank, layout.etp_size) if param.expert is not None else (at.tp_rank, layout.tp_size)
            param.write(held[param.name], out, self._shape, rank, size)

    def _is_mine(self, param: Param) -> bool:
        layout, at = self._groups.layout, self._groups.at
        if at.pp_rank != _owner_stage(param, self._shape, self._groups):
            return False
        copy, num_copies = at.dp_rank * layout.cp_size + at.cp_rank, layout.dp_size * layout.cp_size
        if param.expert is not None or param.kind == "replicated":
            # Counted over all ranks of the stage.
            copy, num_copies = copy * layout.tp_size + at.tp_rank, num_copies * layout.tp_size
        if param.expert is not None:
            if at.ep_rank != _owner_ep(param, self._shape, self._groups):
                return False
            experts_apart = layout.etp_size * layout.ep_size
            copy, num_copies = copy // experts_apart, num_copies // experts_apart
        return self._numbers[param.name] % num_copies == copy


def _held(chunks: Sequence[torch.nn.Module], family: Family, shape: ModelShape, groups: Groups) -> dict[str, Tensor]:
    """Name in the table -> this rank's shard. Of tied weights the first."""
    tensors = {(index, name): x for index, model in enumerate(chunks) for name, x in named_tensors(model).items()}
    held: dict[str, Tensor] = {}
    for param, chunk, name in local_params(family, shape, groups):
        held.setdefault(param.name, tensors[chunk, name].detach())
    return held


def _gather(param: Param, local: Tensor | None, example: Tensor, shape: ModelShape, groups: Groups) -> Tensor:
    """The joined tensor on every rank: all-gather over the ranks that split it, then broadcast to the others."""
    layout, at = groups.layout, groups.at
    owner_stage = _owner_stage(param, shape, groups)
    is_of_expert = param.expert is not None
    owner_ep = _owner_ep(param, shape, groups) if is_of_expert else at.ep_rank
    group, size = (groups.etp, layout.etp_size) if is_of_expert else (groups.tp, layout.tp_size)
    if at.pp_rank == owner_stage and at.ep_rank == owner_ep:
        assert local is not None, f"{param.name} is not on stage {owner_stage}, expert rank {owner_ep}"
        full = param.join(_shards(param, local, group, size), shape).contiguous()
    else:
        full = torch.empty(
            param.joined_shape(shape, padded_vocab_size(shape.vocab_size, layout.tp_size)),
            dtype=torch.float32 if param.keeps_float32 else example.dtype,
            device=example.device,
        )
    if is_of_expert and layout.ep_size > 1 and at.pp_rank == owner_stage:
        dist.broadcast(full, src=dist.get_global_rank(groups.ep, owner_ep), group=groups.ep)
    if layout.pp_size > 1:
        dist.broadcast(full, src=dist.get_global_rank(groups.pp, owner_stage), group=groups.pp)
    return full


def _shards(param: Param, local: Tensor, group: dist.ProcessGroup, size: int) -> list[Tensor]:
    if size == 1 or param.kind == "replicated":
        return [local] * size
    shards = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(shards, local.contiguous(), group=group)
    return shards


def _owner_ep(param: Param, shape: ModelShape, groups: Groups) -> int:
    assert param.expert is not None, param.name
    return param.expert // len(groups.layout.experts(shape.num_experts, 0))


def _owner_stage(param: Param, shape: ModelShape, groups: Groups) -> int:
    if param.layer is not None:
        return groups.layout.owner_of_layer(shape.num_layers, param.layer)[0]
    return 0 if param.stage_part == "first" else groups.layout.pp_size - 1
