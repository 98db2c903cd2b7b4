"""Log-probabilities and entropy from logits that are split over the vocabulary.

Dims: T packed tokens, V this rank's part of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TV, labels_T, vocab_start, num_words, temperature, tp_group):
        """log softmax(logits / temperature)[label] and its entropy; only the first num_words columns are words."""
        ctx.set_materialize_grads(False)
        scaled_TV = logits_TV[:, :num_words].float() / temperature
        num_tokens = scaled_TV.shape[0]
        lowest = torch.finfo(torch.float32).min
        max_T = scaled_TV.amax(-1) if num_words else scaled_TV.new_full((num_tokens,), lowest)
        dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=tp_group)
        scaled_TV -= max_T[:, None]
        local_T = labels_T - vocab_start
        is_local_T = (local_T >= 0) & (local_T < num_words)
        local_T = local_T.clamp(0, max(num_words - 1, 0))
        picked_T = scaled_TV.gather(1, local_T[:, None])[:, 0] if num_words else torch.zeros_like(max_T)
        exp_TV = scaled_TV.exp()
        sums = torch.stack([exp_TV.sum(-1), picked_T * is_local_T, (exp_TV * scaled_TV).sum(-1)])
        dist.all_reduce(sums, group=tp_group)
        sum_T, label_T, weighted_T = sums
        log_sum_T = sum_T.log()
        entropy_T = log_sum_T - weighted_T / sum_T
        probs_TV = exp_TV.div_(sum_T[:, None])
        ctx.save_for_backward(probs_TV, local_T, is_local_T, entropy_T)
        ctx.temperature, ctx.num_columns, ctx.dtype = temperature, logits_TV.shape[1], logits_TV.dtype
        return label_T - log_sum_T, entropy_T

    @staticmethod
    def backward(ctx, grad_logprobs_T, grad_entropy_T):
        probs_TV, local_T, is_local_T, entropy_T = ctx.saved_tensors
        grad_TV = torch.zeros_like(probs_TV)
        if grad_logprobs_T is not None:
            grad_TV -= probs_TV * grad_logprobs_T[:, None]
            if probs_TV.shape[1]:
                grad_TV.scatter_add_(1, local_T[:, None], (grad_logprobs_T * is_local_T)[:, None])
        if grad_entropy_T is not None:
            # dH/dz_j = -p_j (log p_j + H)
            grad_TV -= grad_entropy_T[:, None] * (torch.xlogy(probs_TV, probs_TV) + probs_TV * entropy_T[:, None])
        padding = ctx.num_columns - probs_TV.shape[1]
        grad_TV = torch.nn.functional.pad(grad_TV / ctx.temperature, (0, padding))
        return grad_TV.to(ctx.dtype), None, None, None, None, None


def vocab_parallel_logprobs(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    tp_rank: int,
    tp_group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Of softmax(logits / temperature): log-probability of each label, entropy in nats; both [T] float32, with grad.

    logits_TV: [T, padded_vocab / tp].  labels_T: [T] int64.  vocab_size: words; columns beyond are padding and take no
    probability.
    """
    num_columns = logits_TV.shape[1]
    start = tp_rank * num_columns
    num_words = min(max(vocab_size - start, 0), num_columns)
    return _VocabParallelLogprobs.apply(logits_TV, labels_T, start, num_words, temperature, tp_group)


def next_token_to_token(values_P: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Values that position t holds about token t + 1 -> values that token t holds; 0 for the first token of a sequence.

    values_P: [P], P >= T.  cu_seqlens: [S + 1], its last value T.  Returns [T].
    """
    num_tokens = int(cu_seqlens[-1])
    shifted_T = torch.nn.functional.pad(values_P, (1, 0))[:num_tokens]
    is_first_T = torch.zeros(num_tokens, dtype=torch.bool, device=values_P.device)
    is_first_T[cu_seqlens[:-1]] = True
    return shifted_T.masked_fill(is_first_T, 0.0)
