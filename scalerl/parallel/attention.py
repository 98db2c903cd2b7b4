"""Core attention over packed sequences and the RMSNorm of every layer, for megatron's local layer spec."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose weight gradient megatron sums over tp ranks when they hold parts of the sequence."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight.sequence_parallel = config.sequence_parallel


class PackedAttention(torch.nn.Module):
    """Causal attention inside each sequence of a packed (THD) micro-batch.

    On CUDA one variable-length flash call for the whole micro-batch; on CPU scaled_dot_product_attention per sequence.
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
            group = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (key, value))
            max_seqlen = packed_seq_params.max_seqlen_q
            out = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, is_causal=True)
        else:
            bounds = cu_seqlens.tolist()
            out = torch.cat(
                [
                    F.scaled_dot_product_attention(
                        *(x[start:end].transpose(0, 1) for x in (query, key, value)), is_causal=True, enable_gqa=True
                    ).transpose(0, 1)
                    for start, end in zip(bounds, bounds[1:], strict=False)
                    if end > start
                ]
            )
        return out.reshape(out.shape[0], -1)
