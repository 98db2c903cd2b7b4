"""Stacked experts stored as 4-bit floating point (mxfp4), as gpt-oss is published.

Format: OCP Microscaling Formats 1.0, section 5.3. 32 numbers of a row, of 4 bits each (e2m1), share a scale, a power of
two stored as its exponent + 127. A byte has two neighbours, the first in its low half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from scalerl.models.table import LazyTensor

if TYPE_CHECKING:
    import torch

# The tensor NAME is stored as NAME_blocks and NAME_scales.
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
STORED_DTYPE = "U8"
# Numbers that share a scale.
BLOCK = 32
_EXPONENT_BIAS = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Numbers that are multiplied out at a time.
_CHUNK = 2**22


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that weights are stored as mxfp4."""
    return (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"


@dataclass(frozen=True)
class Mxfp4Tensor:
    """A `LazyTensor` of bfloat16 numbers, [experts, columns, rows].

    blocks: [experts, rows, columns / 32, 16] bytes.  scales: [experts, rows, columns / 32] bytes.
    """

    blocks: LazyTensor
    scales: LazyTensor

    def get_shape(self) -> list[int]:
        experts, rows, blocks, num_bytes = self.blocks.get_shape()
        return [experts, blocks * num_bytes * 2, rows]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The whole, or one expert: its columns and rows by slices.  Of each row whole blocks are read."""
        import torch

        if not isinstance(index, tuple):
            assert index == slice(None), index
            return torch.stack([self[expert, :, :] for expert in range(self.get_shape()[0])])
        expert, *slices = index
        columns, rows = (range(*part.indices(size)) for part, size in zip(slices, self.get_shape()[1:], strict=True))
        first, last = columns.start // BLOCK, -(-columns.stop // BLOCK)
        out = torch.empty(len(rows), len(columns), dtype=torch.bfloat16)
        step = max(1, _CHUNK // max(1, (last - first) * BLOCK))
        for start in range(0, len(rows), step):
            of_chunk = slice(rows.start + start, min(rows.start + start + step, rows.stop))
            numbers = _multiplied_out(
                self.blocks[expert, of_chunk, first:last], self.scales[expert, of_chunk, first:last]
            )
            out[start : start + step] = numbers[:, columns.start - first * BLOCK :][:, : len(columns)]
        return out.transpose(0, 1)


def _multiplied_out(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiplies blocks [rows, n, 16] and scales [rows, n] to bfloat16 numbers [rows, n * 32]; exact."""
    import torch

    pairs = _pairs().index_select(0, blocks.flatten().int()).view(torch.bfloat16)
    numbers = pairs.view(*blocks.shape[:2], BLOCK)
    return torch.ldexp(numbers, scales.int()[..., None] - _EXPONENT_BIAS).flatten(1)


@cache
def _pairs() -> torch.Tensor:
    """[256] int32: for each byte the two numbers in it, bfloat16 one after the other in memory."""
    import torch

    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    return torch.stack([values[byte % 16], values[byte // 16]], dim=-1).view(torch.int32).flatten()


def shape_problem(blocks: LazyTensor, scales: LazyTensor, wanted: tuple[int, ...]) -> str | None:
    """Why the stored tensors do not make one of the wanted shape [experts, columns, rows]; None if they do."""
    experts, columns, rows = wanted
    sizes = [experts, rows, columns // BLOCK]
    stored = list(blocks.get_shape()), list(scales.get_shape())
    if columns % BLOCK == 0 and stored == ([*sizes, BLOCK // 2], sizes):
        return None
    return f"blocks of shape {tuple(stored[0])} and scales of shape {tuple(stored[1])}, config.json says {wanted}"
