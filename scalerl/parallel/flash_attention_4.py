"""The functions of flash-attn-4 as torch 2.13 calls them: its forward has two results, that of newer versions more.

Imported by torch alone, where `trainer.flash_attention_impl` is FA4.
"""

from __future__ import annotations

from typing import Any

from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]  # an optional package

_flash_attn_bwd = interface._flash_attn_bwd


def _flash_attn_fwd(*args: Any, **kwargs: Any) -> Any:
    """Computes the output and the log-sum-exp of attention."""
    return interface._flash_attn_fwd(*args, **kwargs)[:2]
