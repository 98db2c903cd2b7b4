"""The family of GLM-4.5, 4.5-Air, 4.6 and 4.7: DeepSeek-V3's mixture with grouped-query attention.

The rotary embedding turns half of each head. The large models norm each query and key head, Air does not:
config.json says which.
"""

from __future__ import annotations

from scalerl.models.deepseek_v3 import MIXTURE, MIXTURE_RULES
from scalerl.models.rules import decoder_family

FAMILY = decoder_family(
    "glm4_moe",
    qk_norm="use_qk_norm",
    qkv_bias="attention_bias",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    mixture=MIXTURE,
    mixture_rules=MIXTURE_RULES,
)
