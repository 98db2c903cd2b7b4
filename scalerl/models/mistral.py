"""The family of Mistral (dense), without sliding windows shorter than the context (v0.2 and later have none)."""

from __future__ import annotations

from scalerl.models.rules import decoder_family

FAMILY = decoder_family(
    "mistral",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    window="sliding_window",
)
