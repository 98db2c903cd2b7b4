"""Gated delta nets in the place of attention, and the gated attention between them (Qwen3-Next, Qwen3.5).

Dims: t this cp rank's tokens (with sequence parallelism those of all tp ranks), P packed tokens of all cp ranks,
K key heads and V value heads of this tp rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from megatron.core.typed_torch import apply_module
from torch import Tensor

from scalerl.models import ModelShape
from scalerl.parallel.delta_rule import causal_conv, gated_delta_rule
from scalerl.parallel.ulysses import gather_tokens, tokens_to_heads

if TYPE_CHECKING:
    from scalerl.parallel.layout import Groups
    from scalerl.parallel.micro_batch import Packing


class GatedDeltaNet(MegatronModule):
    """A gated delta net over packed sequences; state and convolution begin anew with each sequence.

    A tp rank has whole key heads with their value heads, in in_proj.weight and conv_weight head after head
    (`models.table`, kind delta). With context parallelism tokens are swapped for key heads around convolution and rule.
    """

    def __init__(self, config: Any, layer_number: int, shape: ModelShape, groups: Groups, **_: Any) -> None:
        super().__init__(config=config)
        self.layer_number, self.tp_group, self.cp_group = layer_number, groups.tp, groups.cp
        self.num_keys = shape.linear_num_key_heads // groups.tp.size()
        repeat = shape.linear_num_value_heads // shape.linear_num_key_heads
        self.key_dim, self.value_dim = shape.linear_key_head_dim, shape.linear_value_head_dim
        # Rows of a key head: query, key and values, which are convolved; output gate; strength and decay.
        self.rows = (2 * self.key_dim + repeat * self.value_dim, repeat * self.value_dim, 2 * repeat)
        values = shape.linear_num_value_heads * self.value_dim
        own = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": False}
        own["tp_group"] = groups.tp
        self.in_proj = ColumnParallelLinear(
            shape.hidden_size, shape.linear_num_key_heads * sum(self.rows), gather_output=False, **own
        )
        self.out_proj = RowParallelLinear(values, shape.hidden_size, input_is_parallel=True, **own)
        self.conv_weight = _parameter(self.num_keys * self.rows[0], 1, shape.linear_conv_kernel_dim, like=config)
        self.norm_weight = _parameter(self.value_dim, like=config)
        self.A_log = _parameter(self.num_keys * repeat, dtype=torch.float32)
        self.dt_bias = _parameter(self.num_keys * repeat, like=config)

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: Packing, **_: Any
    ) -> tuple[Tensor, None]:
        """Mixes the tokens of each sequence: [t, 1, hidden] (t / tp with sequence parallelism) in and out; no bias."""
        packing = packed_seq_params
        projected = self.in_proj(hidden_states)[0].flatten(0, 1).unflatten(-1, (self.num_keys, -1))
        mixed, gate, strength_decay = projected.split(self.rows, dim=-1)
        if packing.natural is not None:
            both = torch.cat([mixed, strength_decay], dim=-1)
            both = gather_tokens(both, packing.natural, self.cp_group)
            mixed, strength_decay = both.split([self.rows[0], self.rows[2]], dim=-1)
        out = self._mix(mixed, strength_decay, packing.lengths)
        if packing.order is not None:
            out = tokens_to_heads(out, packing.order, self.cp_group)
        gated = self._normed(out.unflatten(-1, (-1, self.value_dim)), gate.unflatten(-1, (-1, self.value_dim)))
        return self.out_proj(gated.flatten(1)[:, None])[0], None

    def _mix(self, mixed: Tensor, strength_decay: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Convolution and delta rule: [P, key heads here, rows] -> [P, key heads here, values of a key head]."""
        conv_weight, decay_rate, bias = (
            self._of_cp_rank(weight) for weight in (self.conv_weight.squeeze(1), self.A_log, self.dt_bias)
        )
        mixed = causal_conv(mixed.flatten(1), conv_weight, lengths).unflatten(-1, (-1, self.rows[0]))
        query, key, values = mixed.split([self.key_dim, self.key_dim, self.rows[1]], dim=-1)
        strength, decay = strength_decay.float().chunk(2, dim=-1)
        decay = -decay_rate.exp() * F.softplus(decay.flatten(1) + bias)
        values = values.unflatten(-1, (-1, self.value_dim)).flatten(1, 2)
        out = gated_delta_rule(query, key, values, decay, strength.flatten(1).sigmoid(), lengths)
        return out.unflatten(1, (query.shape[1], -1)).flatten(2)

    def _of_cp_rank(self, weight: Tensor) -> Tensor:
        """The part of a weight that belongs to the key heads whose tokens this cp rank has inside."""
        return weight.chunk(self.cp_group.size())[self.cp_group.rank()]

    def _normed(self, out: Tensor, gate: Tensor) -> Tensor:
        """RMSNorm of each value head, multiplied with SiLU of the gate: [t, V.., dv] in and out."""
        # Each tp rank norms its own heads with it: the gradients are summed.
        weight = copy_to_tensor_model_parallel_region(self.norm_weight).float()
        normed = F.rms_norm(out.float(), (self.value_dim,), weight, self.config.layernorm_epsilon)
        return (normed * F.silu(gate.float()).view_as(normed)).to(out.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The tensors of a checkpoint; those of heads are split over tp ranks."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        axes: dict[str, int] = dict.fromkeys(("A_log", "dt_bias", "conv_weight"), 0)
        sharded = make_sharded_tensors_for_checkpoint(
            own, prefix, axes, sharded_offsets, tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"]
        )
        for name, module in self.named_children():
            sharded |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return sharded


def _parameter(*size: int, like: Any = None, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
    empty = torch.empty(size, dtype=dtype or like.params_dtype, device=torch.cuda.current_device())
    return torch.nn.Parameter(empty)


class GatedSelfAttention(SelfAttention):
    """megatron's attention with an output gate, whose rows follow those of each query head as in the files.

    megatron's own order is all query heads of a group, then all gates.
    """

    def get_query_key_value_tensors(  # pyright: ignore[reportIncompatibleMethodOverride]  # fewer ways than megatron's
        self, hidden_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """query, key, value, gate: [t, 1, heads of each, head_dim]."""
        head_dim = self.hidden_size_per_attention_head
        # megatron's type of it cannot be called.
        linear: Any = self.linear_qkv
        mixed = linear(hidden_states)[0].unflatten(-1, (self.num_query_groups_per_partition, -1))
        both, key, value = mixed.split([mixed.shape[-1] - 2 * head_dim, head_dim, head_dim], dim=-1)
        query, gate = both.unflatten(-1, (-1, 2, head_dim)).flatten(2, 3).unbind(3)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = apply_module(self.q_layernorm)(query), apply_module(self.k_layernorm)(key)
        return query, key, value, gate

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        # megatron's is compiled, on a CPU too.
        return (x * gate.float().sigmoid().view(x.shape)).to(x.dtype)
