"""The family of GLM-4-0414 and GLM-Z1 (dense): attention and MLP are normed on both sides, half of each head turns."""

from __future__ import annotations

from scalerl.models.rules import GATE_UP_MLP, decoder_family

FAMILY = decoder_family(
    "glm4",
    qkv_bias="attention_bias",
    dense_mlp=GATE_UP_MLP,
    facts={"post_norms": True, "rotary_interleaved": True},
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-07,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
    },
)
