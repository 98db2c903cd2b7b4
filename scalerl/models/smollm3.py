"""The family of SmolLM3 (dense): every fourth layer has no rotary embedding (arXiv 2501.18795)."""

from __future__ import annotations

from scalerl.models.rules import decoder_family

FAMILY = decoder_family(
    "smollm3",
    nope_layers=True,
    defaults={
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
        "eos_token_id": 128001,
    },
    refused=("attention_bias", "mlp_bias", "use_sliding_window"),
)
