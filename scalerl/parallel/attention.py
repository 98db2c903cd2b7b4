"""Core attention over packed sequences and the RMSNorm of every layer, for megatron's local layer spec."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from scalerl.parallel.cpu_kernels import rms_norm
from scalerl.parallel.marks import mark
from scalerl.parallel.micro_batch import Packing
from scalerl.parallel.rotary import rotate_queries_and_keys
from scalerl.parallel.ulysses import heads_to_tokens, tokens_to_heads


@cache
def _varlen_attn() -> Callable[..., Any] | None:
    """torch's attention over packed sequences on CUDA, or None; its import takes half a second, of no use on a CPU."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


@cache
def _takes_fewer_key_heads(attention: Callable[..., Any]) -> bool:
    """Whether torch's attention takes fewer key than query heads: 2.12 and newer; 2.11 wants as many."""
    return "enable_gqa" in inspect.signature(attention).parameters


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose weight gradient megatron sums over tp ranks when they hold parts of the sequence."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda or x.dtype != torch.float32:
            return super().forward(x)
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class PackedAttention(torch.nn.Module):
    """Rotary embedding and causal attention inside each sequence of a packed (THD) micro-batch.

    On CUDA one variable-length flash call for the whole micro-batch; on CPU one scaled_dot_product_attention call
    for each sequence length. Neither computes padding. With context parallelism tokens are swapped for heads before
    and back after (`ulysses`).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        cp_group: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.cp_group = cp_group
        if config.context_parallel_size > 1 and cp_group is None:
            raise ValueError("context parallelism needs the cp group: ModuleSpec(PackedAttention, {'cp_group': ...})")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: Packing,
        **_: Any,
    ) -> Tensor:
        """Attends: query [t, heads/tp, d], key [t, kv_heads/tp, d], value [t, kv_heads/tp, dv] -> [t, heads/tp * dv].

        t: this cp rank's tokens, P / cp.
        """
        packing = packed_seq_params
        query, key = rotate_queries_and_keys(query, key, packing.cos_sin)
        if packing.order is not None and packing.natural is not None:
            query, key, value = heads_to_tokens(query, key, value, packing.natural, self.cp_group)
        # The fused kernels want one head size, on a CPU too: other ones make whole matrices of scores. Zeros after a
        # narrower value stay apart in the output.
        narrower = query.shape[2] - value.shape[2]
        if narrower:
            value = F.pad(value, (0, narrower))
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and _varlen_attn() is not None:
            out = _flash(query, key, value, packing.cu_seqlens_q, packing.max_seqlen_q, self.softmax_scale)
        else:
            out = _per_length(query, key, value, packing.lengths, self.softmax_scale)
        if narrower:
            out = out[..., :-narrower]
        if packing.order is not None:
            out = tokens_to_heads(out, packing.order, self.cp_group)
        return out.reshape(out.shape[0], -1)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float | None
) -> Tensor:
    """[P, heads, d]. CUDA, bfloat16 or float16; torch must have `_varlen_attn`."""
    attention = _varlen_attn()
    assert attention is not None
    # (-1, 0): everything to the left, nothing to the right. torch 2.10's argument is_causal is gone since 2.11.
    options: dict[str, Any] = {"window_size": (-1, 0)}
    if scale is not None:
        options["scale"] = scale
    if current_flash_attention_impl() is not None:
        # FlashAttention 3 would else share out keys as the longest sequence asks, and numbers depend on the packing.
        options["num_splits"] = 1
    group = query.shape[1] // key.shape[1]
    if group > 1 and _takes_fewer_key_heads(attention):
        options["enable_gqa"] = True
    elif group > 1:
        key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    return attention(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)


def _per_length(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scale: float | None) -> Tensor:
    """One scaled_dot_product_attention call for all neighbours of one length: on short ones a call each is overhead.

    Rows of a micro-batch are in the order of their lengths (`micro_batch.by_length`), so these are all of that length.
    """
    runs = [(length, sum(1 for _ in same)) for length, same in groupby(lengths) if length]
    num_tokens = [length * number for length, number in runs]
    outputs = []
    for (length, _), *share in zip(runs, *(x.split(num_tokens) for x in (query, key, value)), strict=True):
        # [N sequences, heads, L, d]
        q, k, v = (tensor.unflatten(0, (-1, length)).transpose(1, 2) for tensor in share)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)
