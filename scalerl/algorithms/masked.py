"""Statistics over the elements that a mask selects.

A masked element never matters: its value may be NaN, and its gradient is 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Added to a variance before its root.
WHITEN_EPS = 1e-8


def masked_mean(
    values: Tensor,
    mask: Tensor,
    axis: int | tuple[int, ...] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Mean over the elements that the mask selects: sum(values * mask) / sum(mask) over `axis`; 0 for an empty mask.

    values, mask: same shape; mask bool or non-negative weights.  axis None: all dims.  Returns `values` reduced over
    `axis`.
    group: process group over whose ranks the sums are taken too, so that all return the same. Every rank must call,
    including one without elements; with an axis, their results must have the same shape. The gradient is that of the
    result with respect to this rank's values.
    """
    _same_shape(values, mask)
    selected, weights = _select(values, mask)
    total, weight = _sums(selected * weights, weights, axis=axis, group=group)
    return torch.where(weight > 0, total / torch.where(weight > 0, weight, 1.0), 0.0)


def masked_var(
    values: Tensor, mask: Tensor, unbiased: bool = True, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Scalar variance of the elements that the mask selects; unbiased: divided by n - 1.  group: as `masked_mean`.

    0 when the mask selects fewer than two elements, so that a shard with one token gives no NaN.
    """
    _same_shape(values, mask)
    selected, weights = _select(values, mask)
    # Deviations sum to 0, so the mean's own gradient does: only over all ranks, not over this one's elements.
    mean = masked_mean(selected, mask, group=group).detach()
    total, count = _sums((selected - mean).square() * weights, weights, group=group)
    divisor = count - 1 if unbiased else count
    return torch.where(divisor > 0, total / torch.where(divisor > 0, divisor, 1.0), 0.0)


def whiten_selected(
    values: Tensor, mask: Tensor, *, counted: Tensor | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Whitens the elements that the mask selects: (values - mean) / sqrt(var + 1e-8); 0 outside the mask.

    mean and unbiased var are over the elements of the mask that `counted` selects too; None: over all of them.
    group: as `masked_mean`.  Returns the shape of `values`.
    """
    _same_shape(values, mask)
    selected, _ = _select(values, mask)
    over = mask if counted is None else mask * counted
    mean = masked_mean(selected, over, group=group)
    whitened = (selected - mean) * torch.rsqrt(masked_var(selected, over, group=group) + WHITEN_EPS)
    return torch.where(mask != 0, whitened, 0.0)


def _select(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(mask != 0, values, 0.0), mask.to(values.dtype)


def _sums(
    *parts: Tensor, axis: int | tuple[int, ...] | None = None, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, ...]:
    """Sums each part over `axis`, and over the ranks of the group in one all-reduce."""
    sums = torch.stack([part.sum() if axis is None else part.sum(dim=axis) for part in parts])
    return (sums if group is None else _SumOverRanks.apply(sums, group)).unbind()


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = local.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _same_shape(values: Tensor, mask: Tensor) -> None:
    if values.shape != mask.shape:
        raise ValueError(f"values {tuple(values.shape)} and mask {tuple(mask.shape)} must have the same shape")
