"""Multi-head latent attention (DeepSeek) for megatron: its configuration and layer."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.spec_utils import ModuleSpec

from scalerl.models import ModelShape


def latent_config(shape: ModelShape) -> dict[str, Any]:
    """The arguments of MLATransformerConfig that only latent attention has; none without it."""
    if shape.kv_lora_rank is None:
        return {}
    yarn = {key: value for key, value in (shape.rope_scaling or {}).items() if key not in ("rope_type", "factor")}
    return {
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_head_dim": shape.qk_nope_head_dim,
        "qk_pos_emb_head_dim": shape.qk_rope_head_dim,
        "v_head_dim": shape.v_head_dim,
        "rope_type": "yarn" if shape.rope_scaling else "rope",
        "rotary_base": shape.rope_theta,
        "rotary_percent": 1.0,
        "rotary_scaling_factor": (shape.rope_scaling or {}).get("factor", 1.0),
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
        **yarn,
    }


def latent_layer_spec(norm: type, *, on_cpu: bool) -> ModuleSpec:
    """The spec of a layer with latent attention.  norm: RMSNorm class of compressed queries, keys and values."""
    # megatron asks for this argument everywhere but here.
    multi_latent_attention.YarnRotaryEmbedding = partial(YarnRotaryEmbedding, use_cpu_initialization=on_cpu)
    if not isinstance(multi_latent_attention.TELinear, type):
        # megatron-core 0.16.1 takes its own stand-in for transformer-engine to be the real one.
        multi_latent_attention.HAVE_TE = False
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=True)
    # megatron says only that it is an object.
    submodules: Any = layer.submodules
    attention = submodules.self_attention.submodules
    # Whole on every tp rank, each for its part of the sequence. Split over tp, as the local spec has them, the rotary
    # part of the keys loses the gradients of other ranks' heads (megatron-core 0.16.1).
    attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
    attention.q_layernorm = attention.kv_layernorm = ModuleSpec(module=norm)
    return layer
