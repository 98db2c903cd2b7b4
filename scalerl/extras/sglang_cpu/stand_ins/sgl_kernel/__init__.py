"""Stand-in for the CPU build of sgl-kernel, which has no wheel, with the names that SGLang imports.

Without AMX, SGLang's CPU path computes everything in plain torch, but it still imports some kernels by name. One is
called in every batch and is implemented here; the others belong to speculative decoding and raise when called.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Writes the next cache slots to columns start[i]:end[i] of row `req_pool_indices[i]` of req_to_token."""
    first = 0
    for row, low, high in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        slots = out_cache_loc[first : first + high - low]
        req_to_token[row, low:high] = slots.to(req_to_token.dtype)
        first += high - low


def __getattr__(name: str) -> Callable:
    if not name.endswith("_cpu"):
        raise AttributeError(f"module 'sgl_kernel' (CPU stand-in) has no attribute {name!r}")

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            f"sgl_kernel.{name} needs the compiled CPU kernels of SGLang, which are not installed"
        )

    return missing


# The weight checksums of SGLang 0.5.21 synchronize with CUDA even on a CPU; without a GPU that must do nothing.
if not torch.cuda.is_available():
    torch.cuda.synchronize = lambda device=None: None
