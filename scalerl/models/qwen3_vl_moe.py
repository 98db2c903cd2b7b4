"""The family of Qwen3-VL with experts: Qwen3-VL's tower, and Qwen3-MoE's language model with stacked experts."""

from __future__ import annotations

from dataclasses import replace

from scalerl.models import qwen3_moe, qwen3_vl
from scalerl.models.mixture import Mixture
from scalerl.models.rules import decoder_family, released, router
from scalerl.models.table import ParamPattern

_MEGATRON = "decoder.layers.{i}.mlp.experts.local_experts.{e}"
_HF = "model.layers.{i}.mlp.experts"
_EXPERTS = (
    ParamPattern(
        f"{_MEGATRON}.linear_fc1.weight",
        (f"{_HF}.gate_up_proj",) * 2,
        "gate_up",
        (("expert_ffn", "hidden"),) * 2,
        "mixture",
        sections=(("expert_ffn",), ("expert_ffn",)),
        stacked=True,
    ),
    ParamPattern(
        f"{_MEGATRON}.linear_fc2.weight",
        (f"{_HF}.down_proj",),
        "row",
        (("hidden", "expert_ffn"),),
        "mixture",
        stacked=True,
    ),
)
_TEXT = decoder_family(
    "qwen3_vl_moe",
    qk_norm=True,
    defaults={
        "num_key_value_heads": 16,
        "decoder_sparse_step": 1,
        "rope_theta": 5e5,
        "max_position_embeddings": 128000,
    },
    refused=("attention_bias",),
    mixture=Mixture(
        experts=("num_experts", "num_local_experts"),
        expert_ffn="moe_intermediate_size",
        layers=qwen3_moe.is_mixture,
    ),
    mixture_rules=(router("mlp.gate"), *_EXPERTS),
)
FAMILY = released(
    _TEXT,
    "qwen3_vl_moe",
    replace(qwen3_vl.TOWER, transformers_class="qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeVisionModel"),
)
