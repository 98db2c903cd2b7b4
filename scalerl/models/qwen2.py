"""The family of Qwen2 and Qwen2.5 (dense)."""

from __future__ import annotations

from scalerl.models.rules import decoder_family

FAMILY = decoder_family("qwen2", qkv_bias=True, defaults={"num_key_value_heads": 32}, refused=("use_sliding_window",))
