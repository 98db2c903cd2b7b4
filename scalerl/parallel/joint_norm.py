"""Attention whose queries are normed over all heads together, and so its keys (MiniMax-M2)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class JointNorm(torch.nn.Module):
    """RMSNorm over all heads of all tp ranks.  weight: [heads / tp * head_dim], of this rank's heads."""

    def __init__(self, config: Any, num_heads: int) -> None:
        super().__init__()
        self.size, self.eps = num_heads * config.kv_channels, config.layernorm_epsilon
        size = self.size // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(
            torch.empty(size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )

    def forward(self, x: Tensor) -> Tensor:
        """[t, 1, heads / tp, head_dim] in and out; the sums of squares of all tp ranks are added, in float32."""
        numbers = x.float()
        squares = reduce_from_tensor_model_parallel_region(numbers.square().sum((-2, -1), keepdim=True))
        # Every rank's heads depend on the sum: its gradients are added too.
        squares = copy_to_tensor_model_parallel_region(squares)
        normed = numbers * torch.rsqrt(squares / self.size + self.eps)
        return (normed * self.weight.float().view(x.shape[-2:])).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The tensors of a checkpoint: the weight of all heads."""
        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight}, prefix, {"weight": 0}, sharded_offsets=sharded_offsets
        )


class JointlyNormedAttention(SelfAttention):
    """megatron's attention with a `JointNorm` of queries and one of keys; megatron's own norms are of each head."""

    def __init__(self, config: Any, *args: Any, **named: Any) -> None:
        super().__init__(config, *args, **named)
        self.q_norm = JointNorm(config, config.num_attention_heads)
        self.k_norm = JointNorm(config, config.num_query_groups)

    def get_query_key_value_tensors(self, *args: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        """query, key, value: [t, 1, heads of each, head_dim]."""
        # megatron's type has the ways in which it returns fewer or more.
        separate: Any = super().get_query_key_value_tensors(*args, **named)
        query, key, value = separate
        return self.q_norm(query), self.k_norm(key), value
