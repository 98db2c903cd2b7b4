"""Rotary position embedding of packed tokens: tables once per micro-batch, applied inside the core attention."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from scalerl.models import ModelShape
from scalerl.parallel.cpu_kernels import rotate_in_blocks


class Rotary:
    """The model's rotary embedding (arXiv 2104.09864), with Llama 3's scaling or YaRN where config.json asks for it."""

    def __init__(self, shape: ModelShape, device: str) -> None:
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        frequencies = 1.0 / shape.rope_theta**exponents
        # What queries and keys are multiplied with.
        self.scale = 1.0
        if shape.rope_scaling and shape.rope_scaling["rope_type"] == "yarn":
            frequencies, self.scale = _yarn(frequencies, shape.rope_scaling, shape.rope_theta)
        elif shape.rope_scaling:
            frequencies = _llama3(frequencies, shape.rope_scaling)
        self.frequencies = frequencies.to(device)

    def tables(self, position_ids: Tensor) -> Tensor:
        """Cosines and sines of positions: position_ids [T] int64 -> [2, T, head_dim / 2] float32."""
        angles = position_ids[:, None].float() * self.frequencies
        return torch.stack([angles.cos(), angles.sin()]) * self.scale


def _llama3(frequencies: Tensor, scaling: dict) -> Tensor:
    """Scales frequencies by Llama 3.1's rule: long waves are stretched by `factor`, short ones kept, others blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling["factor"])


def _yarn(frequencies: Tensor, scaling: dict, theta: float) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071, section 3.2 and eq. 22): (frequencies, scale of queries and keys).

    Pairs that turn more than beta_fast times over the original positions are kept, those that turn less than beta_slow
    times are stretched by `factor`, those between blended by their number.
    """
    num_pairs, factor = len(frequencies), scaling["factor"]

    def pair_of(turns: float) -> float:
        """The number of the pair that turns so often over the original positions."""
        return (
            num_pairs * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)) / math.log(theta)
        )

    first, last = pair_of(scaling["beta_fast"]), pair_of(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    # One step where both are the same.
    width = (last - first) or 0.001
    stretched = ((torch.arange(num_pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
    blended = frequencies * (1 - stretched) + frequencies / factor * stretched
    return blended, 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate_pairs(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotates x [T, heads, d]: pairs (i, i + d / 2) turn by their angle. In float32, returned in x's dtype."""
    cos, sin = cos_sin[:, :, None]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


@lru_cache(maxsize=1)
def _compiled_rotate() -> Any:
    return torch.compile(rotate_pairs, dynamic=True)


def rotate_queries_and_keys(query: Tensor, key: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys, as `rotate_pairs`. cos_sin None: they have been rotated already."""
    if cos_sin is None:
        return query, key
    # On CUDA one kernel instead of five.
    turn = _compiled_rotate() if query.is_cuda else rotate_in_blocks if query.dtype == torch.float32 else rotate_pairs
    return turn(query, cos_sin), turn(key, cos_sin)
