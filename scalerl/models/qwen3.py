"""The family of Qwen3 (dense)."""

from __future__ import annotations

from scalerl.models.rules import decoder_family

FAMILY = decoder_family(
    "qwen3",
    qk_norm=True,
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    refused=("attention_bias", "use_sliding_window"),
)
