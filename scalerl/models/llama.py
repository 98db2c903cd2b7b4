"""The family of Llama 2 and 3 (dense)."""

from __future__ import annotations

from scalerl.models.rules import decoder_family

FAMILY = decoder_family(
    "llama",
    defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
    refused=("attention_bias", "mlp_bias"),
)
