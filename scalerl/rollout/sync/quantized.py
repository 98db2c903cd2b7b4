"""Weights for servers that compute in fp8: each matrix in 8 bits, followed by the scales of its blocks.

They are made from a bucket of whole tensors, on the ranks that need the bucket, so every transport sends half the
bytes. Each rank that makes them gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from scalerl.models.block_scales import FP8_BLOCK, SCALE_SUFFIX, is_quantized, quantize, scales_shape

if TYPE_CHECKING:
    from scalerl.parallel.export import Needed
    from scalerl.rollout.servers.buckets import NamedTensors
    from scalerl.rollout.sync.session import Export

# Most bytes of a bucket -> per bucket (name, shape, dtype) of what `Export` yields.
Layout = Callable[[int], Sequence[Sequence[tuple[str, Sequence[int], torch.dtype]]]]


def quantized_export(export: Export) -> Export:
    """The export of a model whose matrices are quantized (`is_quantized`)."""

    def quantized(bucket_bytes: int, needed: Needed) -> Iterator[NamedTensors]:
        for named in export(bucket_bytes, needed):
            yield quantized_tensors(named)

    return quantized


def quantized_tensors(named: NamedTensors) -> NamedTensors:
    """The tensors of a bucket as servers in fp8 take them."""
    tensors = []
    for name, tensor in named:
        if is_quantized(name, tensor.shape):
            numbers, scales = quantize(tensor.detach())
            tensors += [(name, numbers), (name + SCALE_SUFFIX, scales)]
        else:
            tensors.append((name, tensor))
    return tensors


def quantized_layout(layout: Layout) -> Layout:
    """The layout of what `quantized_export` yields."""

    def quantized(bucket_bytes: int) -> list[list[tuple[str, Sequence[int], torch.dtype]]]:
        return [[entry for tensor in bucket for entry in _entries(*tensor)] for bucket in layout(bucket_bytes)]

    return quantized


def _entries(name: str, size: Sequence[int], dtype: torch.dtype) -> list[tuple[str, Sequence[int], torch.dtype]]:
    if not is_quantized(name, size):
        return [(name, size, dtype)]
    scales = scales_shape(list(size), FP8_BLOCK)
    return [(name, size, torch.float8_e4m3fn), (name + SCALE_SUFFIX, scales, torch.float32)]
