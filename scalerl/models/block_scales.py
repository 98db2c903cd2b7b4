"""Weights stored as 8-bit floating point with one scale for each block of rows and columns, as DeepSeek-V3's are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scalerl.models.mxfp4 import BLOCK, is_mxfp4
from scalerl.models.table import LazyTensor

if TYPE_CHECKING:
    import torch

# The scales of tensor NAME are NAME_scale_inv: what a block's numbers are multiplied with.
SCALE_SUFFIX = "_scale_inv"
STORED_DTYPE = "F8_E4M3"
_QUANTIZATION = "quantization_config"


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
    if method == "fp8" and quantization.get("fmt", "e4m3") == "e4m3" and _is_block(block):
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
