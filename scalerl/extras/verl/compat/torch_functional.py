"""Log-probabilities from whole logits, whitening of padded batches, and a learning rate schedule, as verl's.

A run of scalerl uses `parallel.logprobs` (which never has whole logits), `algorithms.whiten_selected` and
`parallel.optimizer.build_schedule`.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from scalerl.algorithms.masked import WHITEN_EPS, masked_mean, masked_var

__all__ = ["get_constant_schedule_with_warmup", "logprobs_from_logits", "masked_mean", "masked_whiten"]

# Elements of one float32 working copy of the logits: 256 MiB.
_CHUNK_ELEMENTS = 1 << 26


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """A schedule that raises the learning rate linearly from 0 to the optimizer's own, and keeps it there.

    Step s of the num_warmup_steps steps has s / num_warmup_steps of it, so the first step has 0.  last_epoch: the
    number of the last step done, to resume after it; -1: start from the beginning.
    """
    return LambdaLR(optimizer, lambda step: min(1.0, step / num_warmup_steps) if num_warmup_steps else 1.0, last_epoch)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Whitens all values by statistics of the masked ones: (values - mean) / sqrt(var + 1e-8), unbiased var.

    Values outside the mask are moved and scaled too, not zeroed.  shift_mean False: the mean is added again after
    scaling.  mask: bool or 0/1, of the shape of `values`.  Returns that shape.  Raises ValueError for another shape.
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + WHITEN_EPS)
    return whitened if shift_mean else whitened + mean


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """The log-probability of the label at every position: log softmax(logits)[label].

    logits: [..., V] float.  labels: [...] int64 in [0, V).  Returns [...] float32 (float64 for float64 logits).
    Works on float32 copies of a few rows at a time: no second [..., V] tensor in the forward pass.
    inplace_backward: where flash-attn is installed the gradient overwrites `logits`, which saves one [..., V] tensor;
    autograd raises when another operation still needs them. Without flash-attn, and for a leaf of the graph, `logits`
    are not changed.
    Raises ValueError when the shapes do not match.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} must have the shape of logits {tuple(logits.shape)} less the last dim"
        )
    in_place = inplace_backward and not logits.is_leaf and _has_flash_attn()
    return _LabelLogprobs.apply(logits, labels, in_place)


@functools.cache
def _has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


class _LabelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, inplace_backward: bool) -> Tensor:
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
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
