"""`flops_shape`: the sizes of a model that its floating-point operations follow from."""

from __future__ import annotations

from scalerl.families.shape import ModelShape
from scalerl.metrics import FlopsShape


def flops_shape(shape: ModelShape) -> FlopsShape:
    """The sizes of a model, and of its head, that its floating-point operations follow from."""
    whole = FlopsShape(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        vocab_size=shape.vocab_size,
        num_moe_layers=sum(shape.moe_layers),
        num_experts=shape.num_experts,
        num_experts_per_token=shape.num_experts_per_token,
        moe_ffn_hidden_size=shape.moe_ffn_hidden_size,
        shared_expert_ffn_hidden_size=shape.shared_expert_ffn_hidden_size,
        q_lora_rank=shape.q_lora_rank,
        kv_lora_rank=shape.kv_lora_rank,
        qk_nope_head_dim=shape.qk_nope_head_dim or 0,
        qk_rope_head_dim=shape.qk_rope_head_dim or 0,
        v_head_dim=shape.v_head_dim or 0,
    )
    return whole.as_critic() if shape.head == "value" else whole
