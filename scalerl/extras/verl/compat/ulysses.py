"""Ulysses sequence parallelism over padded batches, as verl's.

A run of scalerl uses `parallel.ulysses`, which splits packed sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_group: dist.ProcessGroup | None = None


def set_ulysses_sequence_parallel_group(group: dist.ProcessGroup | None) -> None:
    """Sets, for this process, the group that the functions below use when they are called without one."""
    global _group
    _group = group


def get_ulysses_sequence_parallel_group() -> dist.ProcessGroup | None:
    """The group that was set for this process; None before."""
    return _group


def ulysses_pad_and_slice_inputs(
    input_ids_rmpad: Tensor,
    position_ids_rmpad: Tensor | None = None,
    sp_size: int = 1,
    skip_position_ids_rmpad: bool = False,
    pad_value: int = 0,
    *,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None, int]:
    """Pads dim 1 to a multiple of sp_size and takes this rank's contiguous part (no zig-zag).

    input_ids_rmpad: [1, T].  position_ids_rmpad: [..., T]; its padding counts up from 0.  sp_size 1: nothing changes.
    group: sp_size ranks; None: the group of `set_ulysses_sequence_parallel_group`.
    skip_position_ids_rmpad: position ids are padded but not split.
    Returns (ids [1, T' / sp_size], positions or None, tokens of padding).
    Raises ValueError when there is no group of sp_size ranks: a slice by another group would be silently wrong.
    """
    if group is None and sp_size > 1:
        group = _group
    if (group.size() if group is not None else 1) != sp_size:
        raise ValueError(f"sp_size={sp_size} needs a group of as many ranks, got {group.size() if group else 'none'}")
    padding = -input_ids_rmpad.shape[1] % sp_size
    input_ids, position_ids = F.pad(input_ids_rmpad, (0, padding), value=pad_value), position_ids_rmpad
    if position_ids is not None and padding:
        count = torch.arange(padding, device=position_ids.device, dtype=position_ids.dtype)
        position_ids = torch.cat([position_ids, count.expand(*position_ids.shape[:-1], padding)], dim=-1)
    if group is not None and sp_size > 1:
        input_ids = input_ids.chunk(sp_size, dim=1)[group.rank()]
        if position_ids is not None and not skip_position_ids_rmpad:
            position_ids = position_ids.chunk(sp_size, dim=-1)[group.rank()]
    return input_ids, position_ids, padding


def gather_outputs_and_unpad(
    x: Tensor,
    gather_dim: int,
    unpad_dim: int | None = None,
    padding_size: int = 0,
    grad_scaler: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Joins the ranks' parts along gather_dim and cuts padding_size from the end of unpad_dim.

    grad_scaler: the backward multiplies this rank's slice by the group's size, for a trainer that averages gradients
    over the group; False for one that sums them.
    group: None: the group of `set_ulysses_sequence_parallel_group`; if none is set, x is returned unchanged.
    """
    group = _group if group is None else group
    if group is None:
        return x
    if group.size() > 1:
        x = _GatherDim.apply(x, gather_dim, float(group.size()) if grad_scaler else 1.0, group)
    if padding_size and unpad_dim is not None:
        x = x.narrow(unpad_dim, 0, x.shape[unpad_dim] - padding_size)
    return x


class _GatherDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, scale: float, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.scale, ctx.rank, ctx.size = dim, scale, group.rank(), group.size()
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.chunk(ctx.size, dim=ctx.dim)[ctx.rank] * ctx.scale, None, None, None
