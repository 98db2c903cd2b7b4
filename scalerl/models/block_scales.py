"""Weights as 8-bit floating point with one scale for each block of rows and columns, as DeepSeek-V3's are stored.

`quantize` makes them for servers that compute in fp8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scalerl.models.mxfp4 import BLOCK, is_mxfp4
from scalerl.models.table import InMemory, LazyTensor

if TYPE_CHECKING:
    import torch

# The scales of tensor NAME are NAME_scale_inv: what a block's numbers are multiplied with.
SCALE_SUFFIX = "_scale_inv"
STORED_DTYPE = "F8_E4M3"
_QUANTIZATION = "quantization_config"
# Rows and columns of the blocks that `quantize` makes: activations are rounded in groups as wide.
FP8_BLOCK = (128, 128)
_FP8_MAX = 448.0
# Modules of a layer that servers in fp8 keep in their own dtype: routers, gated delta nets, and of latent attention the
# down projections, which an engine joins, and kv_b_proj, which it multiplies out. The others have most of the weights.
WHOLE_MODULES = (
    "gate",
    "shared_expert_gate",
    "linear_attn",
    "q_a_proj",
    "kv_a_proj_with_mqa",
    "fused_qkv_a_proj_with_mqa",
    "kv_b_proj",
)
# Numbers that are quantized at a time, so that few of them are in memory as float32.
_AT_A_TIME = 2**24


@dataclass(frozen=True)
class BlockScaledTensor:
    """A `LazyTensor` of float32 numbers: stored ones, each times the scale of its block.  block: rows, columns."""

    stored: LazyTensor
    scales: LazyTensor
    block: tuple[int, int]

    def get_shape(self) -> list[int]:
        return self.stored.get_shape()

    def __getitem__(self, index: Any) -> torch.Tensor:
        """A slice of rows, or of rows and columns. Only these numbers and their blocks' scales are read."""
        import torch

        slices = index if isinstance(index, tuple) else (index,)
        rows, columns = (
            range(*part.indices(size)) for part, size in zip((*slices, slice(None))[:2], self.get_shape(), strict=True)
        )
        numbers = self.stored[rows.start : rows.stop, columns.start : columns.stop].to(torch.float32)
        if not numbers.numel():
            return numbers
        height, width = self.block
        first = rows.start // height, columns.start // width
        scales = self.scales[first[0] : -(-rows.stop // height), first[1] : -(-columns.stop // width)].float()
        of_column = torch.arange(columns.start, columns.stop) // width - first[1]
        # One row of blocks at a time, so that the scales of all numbers are never in memory.
        for block_row, scale in enumerate(scales, start=first[0]):
            start, stop = (max(0, edge * height - rows.start) for edge in (block_row, block_row + 1))
            numbers[start:stop] *= scale[of_column]
        return numbers


def scales_shape(shape: list[int], block: tuple[int, int]) -> list[int]:
    """The shape of the scales of a tensor with rows and columns."""
    return [-(-size // length) for size, length in zip(shape, block, strict=True)]


def is_quantized(name: str, size: Sequence[int]) -> bool:
    """Whether a server in fp8 has this Hugging Face tensor in 8 bits: matrices of layers, but WHOLE_MODULES."""
    *modules, leaf = name.split(".")
    return leaf == "weight" and len(size) == 2 and "layers" in modules and not set(modules) & set(WHOLE_MODULES)


def quantize(tensor: torch.Tensor, block: tuple[int, int] = FP8_BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a matrix [rows, columns] to float8_e4m3fn.  block: rows and columns that share a scale.

    Returns the numbers, and float32 scales (`scales_shape`), with which the numbers are to be multiplied: the largest
    of a block becomes the largest of float8_e4m3fn. A block of zeros stays one; one with a number that is not finite
    becomes NaN.
    """
    import torch

    (height, width), (rows, columns) = block, tensor.shape
    numbers = tensor.new_empty((rows, columns), dtype=torch.float8_e4m3fn)
    scales = tensor.new_empty(scales_shape([rows, columns], block), dtype=torch.float32)
    bands = max(1, _AT_A_TIME // (height * columns))
    for first in range(0, len(scales), bands):
        start, stop = first * height, min((first + bands) * height, rows)
        part = torch.nn.functional.pad(tensor[start:stop].float(), (0, -columns % width, 0, (start - stop) % height))
        tiles = part.view(-1, height, part.shape[1] // width, width)
        scale = (tiles.abs().amax((1, 3)) / _FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
        scales[first : first + bands] = scale
        rounded = (tiles / scale[:, None, :, None]).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        numbers[start:stop] = rounded.view(part.shape)[: stop - start, :columns]
    return numbers, scales


def multiplied_out(numbers: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = FP8_BLOCK) -> torch.Tensor:
    """What `quantize` has made of a matrix, in float32."""
    return BlockScaledTensor(InMemory(numbers), InMemory(scales), block)[:]


def weight_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The rows and columns of a block, by config.json; None: the weights are not quantized.

    Raises ValueError for another kind of quantization.
    """
    quantization = config.get(_QUANTIZATION)
    if not quantization:
        return None
    if is_mxfp4(config):
        return (1, BLOCK)
    method, block = quantization.get("quant_method", "unknown method"), quantization.get("weight_block_size")
    if method == "fp8" and quantization.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn") and _is_block(block):
        return (block[0], block[1])
    raise ValueError(
        f"{_QUANTIZATION} ({method}): of quantized weights only fp8 (e4m3) with weight_block_size and mxfp4 are "
        "read; use the original model"
    )


def _is_block(block: Any) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the same model with weights that are not quantized, as trainers and merges write them."""
    return {key: value for key, value in config.items() if key != _QUANTIZATION}
