"""Log-probabilities and entropy from hidden states, without the logits: linear layer and softmax fused.

The vocabulary may be split over tensor-parallel ranks. Logits exist for a chunk of tokens at a time, in the forward
pass and, computed again, in the backward pass.
Dims: T packed tokens, C tokens of a chunk, H hidden size, V rows of this rank's part of the output weight, W of them
that are words, not padding, L labels of a token, K likeliest words of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from scalerl.parallel.layout import mark

# Float32 logits of one chunk, at most; two buffers of this size live during a pass.
CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
# Tokens of one chunk, at most: with these a GPU computes longer than it waits for memory (`chunk_cost`).
CHUNK_TOKENS = {"cpu": 2**31, "cuda": 4096}
# Rows of the weight whose gradient is one temporary, when weight and gradient differ in dtype.
_GRADIENT_BLOCK_ROWS = 16384


def linear_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    tp_rank: int = 0,
    tp_group: dist.ProcessGroup | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The log-probability of each label, and the entropy in nats, under softmax(hidden @ weight^T / temperature).

    hidden_TH: [T, H], the same on all ranks of tp_group.  weight_VH: [V, H], rows tp_rank * V ... of the padded
    vocabulary.  Both float32, bfloat16 or float16; logits are float32 (on a GPU never rounded to less).
    labels: [T] int64 in [0, vocab_size), or [T, L] of several words of a token, all but the first of them different.
    vocab_size: rows from here on are padding and take no probability.
    tp_group: None for a vocabulary that is not split.  chunk_tokens: None: `tokens_of_chunk`.
    Returns float32 log-probs of the shape of the labels, and entropy [T], the same on all ranks, with gradients for
    hidden and weight.

    The gradient of hidden is this rank's share, of its part of the vocabulary: the region that hands hidden over must
    sum it over tp_group (megatron's copy_to_tensor_model_parallel_region, or gather_from_sequence_parallel_region with
    tensor_parallel_output_grad=True). The gradient of weight is whole: nothing is to be summed over tp_group.
    A weight with `main_grad` (megatron's DDP) gets its gradient added there, in main_grad's dtype, and says so with
    `grad_added_to_main_grad`, as megatron's own fused layers do.

    Raises ValueError for a label outside the vocabulary on the CPU; on a GPU the check would have to wait for it.
    """
    words = _Words.of_rank(weight_VH, vocab_size, tp_rank)
    if chunk_tokens is None:
        chunk_tokens = tokens_of_chunk(hidden_TH.device.type, words.count)
    _check_labels(labels, vocab_size)
    labels_TL = labels[:, None] if labels.dim() == 1 else labels
    logprobs_TL, entropy_T = _LinearLogprobs.apply(
        hidden_TH, weight_VH, labels_TL, words, temperature, tp_group, chunk_tokens
    )
    return logprobs_TL.view(labels.shape), entropy_T


@torch.no_grad()
def linear_top_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    top_k: int,
    vocab_size: int,
    temperature: float = 1.0,
    tp_rank: int = 0,
    tp_group: dist.ProcessGroup | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of `linear_logprobs`, and the log-probs and ids of each token's likeliest words, the likeliest first.

    top_k: K, at most vocab_size.  Further arguments: as `linear_logprobs`, labels of one word each.
    Returns logprobs [T], entropy [T], top log-probs [T, K] float32 and top ids [T, K] int64, without gradients.
    """
    words = _Words.of_rank(weight_VH, vocab_size, tp_rank)
    if chunk_tokens is None:
        chunk_tokens = tokens_of_chunk(hidden_TH.device.type, words.count)
    _check_labels(labels_T, vocab_size)
    top = _TopWords.none(hidden_TH, top_k)
    labels_TL = labels_T[:, None]
    local = _local_sums(hidden_TH, weight_VH, labels_TL, words, temperature, chunk_tokens, top)
    max_T, sum_T, weighted_T, label_TL = _sum_over_ranks(local, words.find(labels_TL)[1], tp_group)
    log_sum_T = sum_T.log()
    values_TK, ids_TK = top.over_ranks(local[0] - max_T, tp_group)
    return label_TL[:, 0] - log_sum_T, log_sum_T - weighted_T / sum_T, values_TK - log_sum_T[:, None], ids_TK


def tokens_of_chunk(device: str, num_words: int) -> int:
    """The number of tokens whose logits exist at a time.  num_words: of this rank."""
    return max(1, min(CHUNK_TOKENS[device], CHUNK_BYTES[device] // (4 * max(1, num_words))))


def chunk_cost(num_tokens: int, num_words: int, hidden_size: int, weight_bytes: int = 2) -> dict[str, float]:
    """The work of one chunk's backward pass on a GPU: {"flops", "bytes"}, of which the longer one decides the time.

    Products (logits again, gradient of hidden, gradient of the weight): 6 C W H FLOPs. Memory: the weight twice and its
    float32 gradient in and out, W H (2 weight_bytes + 8), and seven passes over [C, W] float32. Of 152,000 words,
    hidden 4,096 and 1,766 tokens (1 GiB) that is 6.6 TFLOP, 11 ms at 600 TFLOP/s, and 15 GB, 4.5 ms at 3.35 TB/s; of
    the 441 tokens of 256 MiB 2.7 ms and 2.8 ms. These are predictions: nobody has measured them.
    """
    return {
        "flops": 6.0 * num_tokens * num_words * hidden_size,
        "bytes": float(num_words * hidden_size * (2 * weight_bytes + 8) + 7 * 4 * num_tokens * num_words),
    }


def _multiplies_into_float32(operand: Tensor) -> bool:
    """Whether torch gives the products of half-precision matrices in float32, which it does on a GPU."""
    return operand.device.type == "cuda" and "dtype_out" in torch.ops.aten.addmm.overloads()


def _check_labels(labels: Tensor, vocab_size: int) -> None:
    if labels.device.type != "cpu" or not labels.numel():
        return
    bad = ((labels < 0) | (labels >= vocab_size)).nonzero()
    if len(bad):
        token, label = int(bad[0][0]), int(labels[tuple(bad[0])])
        raise ValueError(f"token {token}: id {label} is outside the vocabulary of {vocab_size} words")


@dataclass(frozen=True)
class _Words:
    """The words of the vocabulary that this rank's rows stand for: [start, start + count)."""

    start: int
    count: int

    @classmethod
    def of_rank(cls, weight_VH: Tensor, vocab_size: int, tp_rank: int) -> _Words:
        num_rows = weight_VH.shape[0]
        start = tp_rank * num_rows
        return cls(start, min(max(vocab_size - start, 0), num_rows))

    def find(self, labels_TL: Tensor) -> tuple[Tensor, Tensor]:
        """Locates each label in this rank's part of the vocabulary: (its row, clamped; whether it is there)."""
        rows_TL = labels_TL - self.start
        return rows_TL.clamp(0, max(self.count - 1, 0)), (rows_TL >= 0) & (rows_TL < self.count)


@dataclass(frozen=True)
class _TopWords:
    """The likeliest words of each token among this rank's: logit / temperature - this rank's maximum, and id."""

    values_TK: Tensor
    ids_TK: Tensor

    @classmethod
    def none(cls, hidden_TH: Tensor, top_k: int) -> _TopWords:
        dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
        values_TK = hidden_TH.new_full((hidden_TH.shape[0], top_k), -torch.inf, dtype=dtype)
        return cls(values_TK, torch.zeros_like(values_TK, dtype=torch.int64))

    def fill(self, part: slice, z_CW: Tensor, words: _Words) -> None:
        count = min(self.values_TK.shape[1], words.count)
        values_CK, rows_CK = z_CW.topk(count, -1)
        self.values_TK[part, :count] = values_CK
        self.ids_TK[part, :count] = rows_CK + words.start

    def over_ranks(self, shift_T: Tensor, tp_group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Merges those of all ranks.  shift_T: this rank's maximum less that of all, which values are relative to."""
        values_TK = self.values_TK + shift_T[:, None]
        if tp_group is None or dist.get_world_size(tp_group) == 1:
            return values_TK, self.ids_TK
        values, ids = (
            [torch.empty_like(mine_TK) for _ in range(dist.get_world_size(tp_group))]
            for mine_TK in (values_TK, self.ids_TK)
        )
        dist.all_gather(values, values_TK, group=tp_group)
        dist.all_gather(ids, self.ids_TK, group=tp_group)
        values_TK, positions_TK = torch.cat(values, -1).topk(values_TK.shape[1], -1)
        return values_TK, torch.cat(ids, -1).gather(1, positions_TK)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        labels_TL: Tensor,
        words: _Words,
        temperature: float,
        tp_group: dist.ProcessGroup | None,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        local = _local_sums(hidden_TH, weight_VH, labels_TL, words, temperature, chunk_tokens)
        max_T, sum_T, weighted_T, label_TL = _sum_over_ranks(local, words.find(labels_TL)[1], tp_group)
        log_sum_T = sum_T.log()
        entropy_T = log_sum_T - weighted_T / sum_T
        ctx.save_for_backward(hidden_TH, weight_VH, labels_TL, max_T, log_sum_T, entropy_T)
        ctx.words, ctx.temperature, ctx.chunk_tokens = words, temperature, chunk_tokens
        return label_TL - log_sum_T[:, None], entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_TL: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, labels_TL, max_T, log_sum_T, entropy_T = ctx.saved_tensors
        words, temperature = ctx.words, ctx.temperature
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_TH = torch.zeros_like(hidden_TH) if needs_hidden else None
        grad_weight = _WeightGradient(weight_VH) if needs_weight else None
        if words.count and not (grad_logprobs_TL is None and grad_entropy_T is None):
            if grad_logprobs_TL is None:
                grad_logprobs_TL = torch.zeros_like(labels_TL, dtype=log_sum_T.dtype)
            label_TL, constant_T, slope_T = _coefficients(
                grad_logprobs_TL, grad_entropy_T, log_sum_T, entropy_T, temperature
            )
            rows_TL, is_mine_TL = words.find(labels_TL)
            label_TL = label_TL * is_mine_TL
            for part, z_CW, exp_CW in _chunks(hidden_TH, weight_VH, words, temperature, ctx.chunk_tokens):
                z_CW.sub_(max_T[part, None])
                if slope_T is None:
                    grad_CW = z_CW.exp_().mul_(constant_T[part, None])
                else:
                    torch.exp(z_CW, out=exp_CW)
                    grad_CW = z_CW.mul_(slope_T[part, None]).add_(constant_T[part, None]).mul_(exp_CW)
                # Apart: the others differ, so that no sum depends on the order in which a GPU adds.
                for labels in (slice(0, 1), slice(1, None)):
                    grad_CW.scatter_add_(1, rows_TL[part, labels], label_TL[part, labels])
                grad_CW = grad_CW.to(hidden_TH.dtype)
                if grad_hidden_TH is not None:
                    torch.mm(grad_CW, weight_VH[: words.count], out=grad_hidden_TH[part])
                if grad_weight is not None:
                    grad_weight.add(grad_CW, hidden_TH[part])
        return grad_hidden_TH, grad_weight.finish() if grad_weight else None, None, None, None, None, None


def _coefficients(
    grad_logprobs_TL: Tensor,
    grad_entropy_T: Tensor | None,
    log_sum_T: Tensor,
    entropy_T: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes the coefficients (labels, constant, slope) of the gradient of the logits; slope None is 0.

    The gradient of logit j is sum_l labels_l * 1{j = label l} + exp(z_j) * (constant + slope * z_j), with
    z = logit / temperature - max.

    d logprob / d z_j = 1{j = label} - p_j;  d entropy / d z_j = -p_j * (log p_j + entropy);  p_j = exp(z_j) / sum.
    """
    inverse_sum_T = torch.exp(-log_sum_T)
    label_TL = grad_logprobs_TL / temperature
    labels_T = label_TL.sum(-1)
    if grad_entropy_T is None:
        return label_TL, -labels_T * inverse_sum_T, None
    slope_T = -grad_entropy_T / temperature
    constant_T = slope_T * (entropy_T - log_sum_T) - labels_T
    return label_TL, constant_T * inverse_sum_T, slope_T * inverse_sum_T


def _chunks(
    hidden_TH: Tensor, weight_VH: Tensor, words: _Words, temperature: float, chunk_tokens: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields chunks: (tokens, logits / temperature [C, W] float32, scratch of that shape); the next overwrites both."""
    num_tokens = hidden_TH.shape[0]
    # Equal chunks: a last one of a few tokens would read the whole weight for little.
    size = -(-num_tokens // max(1, -(-num_tokens // chunk_tokens)))
    dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
    logits, scratch = (torch.empty(size, words.count, dtype=dtype, device=hidden_TH.device) for _ in range(2))
    weight_HW = weight_VH[: words.count].t()
    for start in range(0, num_tokens, max(size, 1)):
        part = slice(start, min(start + size, num_tokens))
        length = part.stop - part.start
        out_CW = logits[:length]
        if hidden_TH.dtype == dtype:
            torch.addmm(out_CW, hidden_TH[part], weight_HW, beta=0, alpha=1 / temperature, out=out_CW)
        else:
            if _multiplies_into_float32(hidden_TH):
                torch.mm(hidden_TH[part], weight_HW, out_dtype=dtype, out=out_CW)
            else:
                out_CW.copy_(torch.mm(hidden_TH[part], weight_HW))
            if temperature != 1.0:
                out_CW.div_(temperature)
        yield part, out_CW, scratch[:length]


def _local_sums(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_TL: Tensor,
    words: _Words,
    temperature: float,
    chunk_tokens: int,
    top: _TopWords | None = None,
) -> Tensor:
    """Computes statistics of the logits of this rank's words: [3 + L, T]; fills in `top`.

    With z = logit / temperature: max z, sum exp(z - max), sum exp(z - max) * (z - max), and z_label - max of each label
    (of any word where the label is another rank's).
    """
    dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
    statistics = torch.zeros(3 + labels_TL.shape[1], hidden_TH.shape[0], dtype=dtype, device=hidden_TH.device)
    (max_T, sum_T, weighted_T), label_LT = statistics[:3], statistics[3:]
    if not words.count:
        # No infinity: its difference from another one is no number.
        max_T.fill_(torch.finfo(dtype).min)
        return statistics
    rows_TL, _ = words.find(labels_TL)
    for part, z_CW, exp_CW in _chunks(hidden_TH, weight_VH, words, temperature, chunk_tokens):
        torch.amax(z_CW, -1, out=max_T[part])
        z_CW.sub_(max_T[part, None])
        label_LT[:, part] = z_CW.gather(1, rows_TL[part]).t()
        if top is not None:
            top.fill(part, z_CW, words)
        torch.exp(z_CW, out=exp_CW)
        torch.sum(exp_CW, -1, out=sum_T[part])
        torch.sum(exp_CW.mul_(z_CW), -1, out=weighted_T[part])
    return statistics


def _sum_over_ranks(
    local: Tensor, is_mine_TL: Tensor, tp_group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merges `_local_sums` of all ranks into those of the whole vocabulary, by one max and one sum for all tokens.

    Returns max, sum, weighted sum, each [T], and the labels' [T, L].
    """
    (max_T, sum_T, weighted_T), label_LT = local[:3], local[3:]
    if tp_group is None or dist.get_world_size(tp_group) == 1:
        return max_T, sum_T, weighted_T, label_LT.t()
    global_max_T = max_T.clone()
    dist.all_reduce(global_max_T, op=dist.ReduceOp.MAX, group=tp_group)
    shift_T = max_T - global_max_T
    scale_T = shift_T.exp()
    sums = torch.cat(
        [
            (sum_T * scale_T)[None],
            ((weighted_T + shift_T * sum_T) * scale_T)[None],
            (label_LT + shift_T) * is_mine_TL.t(),
        ]
    )
    dist.all_reduce(sums, group=tp_group)
    return global_max_T, sums[0], sums[1], sums[2:].t()


class _WeightGradient:
    """Sum over chunks, in float32, of the gradient of the output weight; in main_grad where megatron's DDP has one."""

    def __init__(self, weight_VH: Tensor) -> None:
        self.weight = weight_VH
        dtype = torch.promote_types(weight_VH.dtype, torch.float32)
        main_grad = getattr(weight_VH, "main_grad", None)
        self.in_main_grad = (
            main_grad is not None and main_grad.dtype == dtype and hasattr(weight_VH, "grad_added_to_main_grad")
        )
        self.total: Tensor = (
            torch.zeros_like(weight_VH, dtype=dtype) if main_grad is None or not self.in_main_grad else main_grad
        )

    def add(self, grad_CW: Tensor, hidden_CH: Tensor) -> None:
        count = grad_CW.shape[1]
        if self.total.dtype == hidden_CH.dtype:
            self.total[:count].addmm_(grad_CW.t(), hidden_CH)
            return
        if _multiplies_into_float32(hidden_CH):
            total = self.total[:count]
            torch.addmm(total, grad_CW.t(), hidden_CH, out_dtype=total.dtype, out=total)
            return
        for start in range(0, count, _GRADIENT_BLOCK_ROWS):
            rows = slice(start, min(start + _GRADIENT_BLOCK_ROWS, count))
            self.total[rows].add_(torch.mm(grad_CW[:, rows].t(), hidden_CH))

    def finish(self) -> Tensor | None:
        """The gradient that autograd gets for the weight."""
        if not self.in_main_grad:
            return self.total.to(self.weight.dtype)
        mark(self.weight, grad_added_to_main_grad=True)
        # DDP drops this one unread. A weight that is the embedding too is the exception (megatron marks it so): there
        # autograd brings the embedding's gradient and DDP adds it.
        return None if getattr(self.weight, "zero_out_wgrad", False) else torch.empty_like(self.weight)
