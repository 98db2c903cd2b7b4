"""The family of Seed-OSS (dense)."""

from __future__ import annotations

from scalerl.models.rules import decoder_family

FAMILY = decoder_family(
    "seed_oss",
    qkv_bias="attention_bias",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "eos_token_id": 2,
    },
    refused=("attention_out_bias", "mlp_bias"),
)
