"""Qwen2 and Qwen2.5, dense."""

from __future__ import annotations

from scalerl.families.table import dense_family

FAMILY = dense_family("qwen2", qk_norm=False, qkv_bias=True, refused=("use_sliding_window",))
