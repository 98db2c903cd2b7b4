"""Log-probabilities from whole logits, whitening of padded batches, and a learning rate schedule, as verl's.

A run of scalerl uses `parallel.logprobs` (which never has whole logits), `algorithms.whiten_selected` and
`parallel.optimizer.build_schedule`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from scalerl.algorithms.masked import WHITEN_EPS, masked_mean, masked_var

__all__ = ["get_constant_schedule_with_warmup", "logprobs_from_logits", "masked_mean", "masked_whiten"]


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
    inplace_backward: is taken as verl takes it, and changes nothing: `logits` are never overwritten.
    Raises ValueError when the shapes do not match.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} must have the shape of logits {tuple(logits.shape)} less the last dim"
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.gather(-1, labels[..., None]).squeeze(-1) - logits.logsumexp(-1)
