"""Qwen3, dense."""

from __future__ import annotations

from scalerl.families.table import dense_family

FAMILY = dense_family(
    "qwen3",
    qk_norm=True,
    qkv_bias=False,
    default_head_dim=128,
    refused=("attention_bias", "use_sliding_window"),
)
