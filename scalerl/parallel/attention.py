"""Core attention over packed sequences and the RMSNorm of every layer, for megatron's local layer spec."""

from __future__ import annotations

import inspect
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

# torch 2.12 and newer; 2.11 wants as many key as query heads.
_VARLEN_HAS_GQA = varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose weight gradient megatron sums over tp ranks when they hold parts of the sequence."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight.sequence_parallel = config.sequence_parallel


class PackedAttention(torch.nn.Module):
    """Causal attention inside each sequence of a packed (THD) micro-batch.

    On CUDA one variable-length flash call for the whole micro-batch; on CPU one scaled_dot_product_attention call
    for each sequence length. Neither computes padding.
    """

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
        super().__init__()
        if config.context_parallel_size > 1:
            raise ValueError("context parallelism needs its own core attention; set context_parallel_size=1")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: Any,
        **_: Any,
    ) -> Tensor:
        """query [T, heads/tp, d], key and value [T, kv_heads/tp, d] -> [T, heads/tp * d]."""
        cu_seqlens = packed_seq_params.cu_seqlens_q
        if query.is_cuda and varlen_attn is not None and query.dtype in (torch.bfloat16, torch.float16):
            out = _flash(query, key, value, cu_seqlens, packed_seq_params.max_seqlen_q)
        else:
            out = _per_length(query, key, value, cu_seqlens)
        return out.reshape(out.shape[0], -1)


def _flash(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """[T, heads/tp, d]. CUDA, bfloat16 or float16."""
    # (-1, 0): everything to the left, nothing to the right. torch 2.10's argument is_causal is gone since 2.11.
    options: dict[str, Any] = {"window_size": (-1, 0)}
    group = query.shape[1] // key.shape[1]
    if group > 1 and _VARLEN_HAS_GQA:
        options["enable_gqa"] = True
    elif group > 1:
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    return varlen_attn(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)


def _per_length(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Tensor:
    """One scaled_dot_product_attention call for all sequences of one length: on short ones a call each is overhead."""
    rows_by_length = _rows_by_length(tuple(cu_seqlens.tolist()), str(query.device))
    outputs = []
    for rows_NL in rows_by_length:
        # [N sequences, heads, L, d]
        q, k, v = (x[rows_NL].transpose(1, 2) for x in (query, key, value))
        outputs.append(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)
        )
    order = torch.cat([rows_NL.flatten() for rows_NL in rows_by_length])
    return torch.cat(outputs)[order.argsort()]


@lru_cache(maxsize=8)
def _rows_by_length(bounds: tuple[int, ...], device: str) -> tuple[Tensor, ...]:
    """For each length L that occurs, [N, L] int64: the packed tokens of the N sequences of that length.

    Cached because every layer of a micro-batch asks for the same.
    """
    starts: dict[int, list[int]] = {}
    for start, end in pairwise(bounds):
        if end > start:
            starts.setdefault(end - start, []).append(start)
    return tuple(
        (torch.tensor(found)[:, None] + torch.arange(length)).to(device) for length, found in sorted(starts.items())
    )
