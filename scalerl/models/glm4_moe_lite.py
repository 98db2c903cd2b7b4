"""The family of GLM-4.7-Flash: DeepSeek-V3's latent attention and mixture, with the first layer dense."""

from __future__ import annotations

from dataclasses import replace

from scalerl.models.deepseek_v3 import ATTENTION, MIXTURE, MIXTURE_RULES
from scalerl.models.rules import decoder_family

FAMILY = decoder_family(
    "glm4_moe_lite",
    attention=ATTENTION,
    defaults={
        "num_key_value_heads": 20,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "eos_token_id": 1,
    },
    refused=("attention_bias",),
    mixture=replace(
        MIXTURE,
        # SGLang reads first_k_dense_replace, transformers mlp_layer_types.
        layers=lambda config, layer: layer >= 1,
        layer_types="mlp_layer_types",
        refused=(*MIXTURE.refused, ("first_k_dense_replace", 1)),
    ),
    mixture_rules=MIXTURE_RULES,
)
