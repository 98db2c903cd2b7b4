"""Llama 2 and 3, dense."""

from __future__ import annotations

from scalerl.families.table import dense_family

FAMILY = dense_family("llama", qk_norm=False, qkv_bias=False, refused=("attention_bias", "mlp_bias"))
