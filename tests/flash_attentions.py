"""Packages with the functions that torch looks for in FlashAttention 3 and 4: they compute nothing."""

from __future__ import annotations

import sys
from pathlib import Path

from torch.nn.attention import _fa4

from scalerl.parallel.flash_attention import use_flash_attention

# What flash-attn-4 4.0.0b36 has: five results of the forward.
INTERFACE_4 = """
def _flash_attn_fwd(q, k, v, **options):
    return q + 1, k + 2, None, None, options

def _flash_attn_bwd(q, k, v, out, dout, lse, **options):
    return q, k, v
"""
# What FlashAttention 3 registers when it is imported.
INTERFACE_3 = """
import torch

library = torch.library.Library("flash_attn_3", "DEF")
library.define("fwd(Tensor q) -> Tensor")
library.define("bwd(Tensor q) -> Tensor")
"""
FILES = {"FA3": ("flash_attn_interface.py", INTERFACE_3), "FA4": ("flash_attn/cute/interface.py", INTERFACE_4)}


def install(directory: Path, *impls: str) -> Path:
    """Puts the packages of these implementations into a directory, which is returned: it belongs on Python's path."""
    for impl in impls:
        name, text = FILES[impl]
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def forget() -> None:
    """Makes this process call torch's own and forget the packages."""
    use_flash_attention(None)
    _fa4._fa4_import_module.cache_clear()
    for name in [name for name in sys.modules if name.startswith("flash_attn") or name.endswith("flash_attention_4")]:
        del sys.modules[name]
