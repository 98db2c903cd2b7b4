"""Statistics over the elements that a mask selects, and log-probabilities of labels.

A masked element never matters: its value may be NaN, and its gradient is 0.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# Elements of one float32 working copy of the logits: 256 MiB.
_CHUNK_ELEMENTS = 1 << 26


def masked_mean(
    values: Tensor,
    mask: Tensor,
    axis: int | tuple[int, ...] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """sum(values * mask) / sum(mask) over `axis` (None: all); 0 where the mask is empty.

    values, mask: same shape; mask bool or non-negative weights.  Returns `values` reduced over `axis`.
    group: the sums are over its ranks too, so that all of them return the same. Each must call, a rank without elements
    as well; with an axis, results must have one shape. The gradient is that of the result by this rank's values.
    """
    _same_shape(values, mask)
    selected, weights = _select(values, mask)
    total, weight = _sums(selected * weights, weights, axis=axis, group=group)
    return torch.where(weight > 0, total / torch.where(weight > 0, weight, 1.0), 0.0)


def masked_var(
    values: Tensor, mask: Tensor, unbiased: bool = True, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Scalar variance over the elements of the mask; unbiased: divided by n - 1.  group: as `masked_mean`.

    0 when the mask selects fewer than two elements (they have no spread), so that a shard with one token goes on.
    """
    _same_shape(values, mask)
    selected, weights = _select(values, mask)
    # Deviations sum to 0, so the mean's own gradient does: only over all ranks, not over this one's elements.
    mean = masked_mean(selected, mask, group=group).detach()
    total, count = _sums((selected - mean).square() * weights, weights, group=group)
    divisor = count - 1 if unbiased else count
    return torch.where(divisor > 0, total / torch.where(divisor > 0, divisor, 1.0), 0.0)


def masked_whiten(
    values: Tensor, mask: Tensor, shift_mean: bool = True, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """(values - mean) / sqrt(var + 1e-8) with mean and unbiased var over the mask; 0 outside the mask.

    shift_mean False: the mean is added again after scaling.  group: as `masked_mean`.  Returns the shape of `values`.
    """
    _same_shape(values, mask)
    selected, _ = _select(values, mask)
    mean = masked_mean(selected, mask, group=group)
    whitened = (selected - mean) * torch.rsqrt(masked_var(selected, mask, group=group) + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask != 0, whitened, 0.0)


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = False) -> Tensor:
    """log softmax(logits)[label] for every position.

    logits: [..., V] float.  labels: [...] int64 in [0, V).  Returns [...] float32 (float64 for float64 logits).
    Works on float32 copies of a few rows at a time: no second [..., V] tensor in the forward pass.
    inplace_backward: the gradient overwrites `logits`, which saves one [..., V] tensor; autograd raises when another
    operation still needs them.
    Raises ValueError when the shapes do not match.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} must have the shape of logits {tuple(logits.shape)} less the last dim"
        )
    return _LabelLogprobs.apply(logits, labels, inplace_backward)


class _LabelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, labels: Tensor, inplace_backward: bool) -> Tensor:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        flat_labels = labels.reshape(-1, 1)
        logsumexp = torch.empty(labels.numel(), dtype=dtype, device=logits.device)
        logprobs = torch.empty_like(logsumexp)
        rows = logits.reshape(-1, logits.shape[-1])
        for part in _row_chunks(rows):
            chunk = rows[part].to(dtype)
            logsumexp[part] = torch.logsumexp(chunk, dim=-1)
            logprobs[part] = chunk.gather(1, flat_labels[part]).squeeze(1) - logsumexp[part]
        ctx.save_for_backward(logits, labels, logsumexp)
        ctx.inplace_backward = inplace_backward
        return logprobs.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, logsumexp = ctx.saved_tensors
        rows, flat_labels, flat_grad = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1, 1), grad.reshape(-1, 1)
        out = rows if ctx.inplace_backward else torch.empty_like(rows)
        for part in _row_chunks(rows):
            # d logprob / d logits = onehot(label) - softmax(logits)
            chunk = (rows[part].to(logsumexp.dtype) - logsumexp[part, None]).exp_().mul_(-flat_grad[part])
            chunk.scatter_add_(1, flat_labels[part], flat_grad[part])
            out[part] = chunk.to(out.dtype)
        return out.view(logits.shape), None, None


def _row_chunks(rows: Tensor) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // max(1, rows.shape[1]))
    return [slice(start, start + size) for start in range(0, rows.shape[0], size)]


def _select(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(mask != 0, values, 0.0), mask.to(values.dtype)


def _sums(
    *parts: Tensor, axis: int | tuple[int, ...] | None = None, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, ...]:
    """Each part summed over `axis`, and over the ranks of the group in one all-reduce."""
    sums = torch.stack([part.sum() if axis is None else part.sum(dim=axis) for part in parts])
    return (sums if group is None else _SumOverRanks.apply(sums, group)).unbind()


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = local.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _same_shape(values: Tensor, mask: Tensor) -> None:
    if values.shape != mask.shape:
        raise ValueError(f"values {tuple(values.shape)} and mask {tuple(mask.shape)} must have the same shape")
