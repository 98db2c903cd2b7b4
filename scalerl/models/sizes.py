"""The numbers of parameters and bytes of a whole model, counted in its family's table."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

from scalerl.models.block_scales import FP8_BLOCK, is_quantized
from scalerl.models.registry import family_of
from scalerl.models.shape import ModelShape
from scalerl.models.table import Param

# Bytes of float32.
FLOAT = 4
ITEMSIZE = {"float32": FLOAT, "bfloat16": 2, "float16": 2}


@cache
def counted_params(shape: ModelShape) -> tuple[tuple[Param, int], ...]:
    """The parameters, each with how many there are like it: one expert of a layer stands for all."""
    with_one = replace(shape, num_experts=min(1, shape.num_experts))
    params = family_of(shape).params(with_one)
    return tuple((param, 1 if param.expert is None else shape.num_experts) for param in params)


@cache
def num_parameters(shape: ModelShape) -> int:
    """The number of parameters of the whole model, as its files hold them."""
    return sum(count * _numbers(param, shape) for param, count in counted_params(shape))


@cache
def model_bytes(shape: ModelShape, itemsize: int, *, in_fp8: bool = False) -> int:
    """The bytes of the whole model in Hugging Face's tensors: what a weight sync sends.  in_fp8: to servers in fp8."""
    return sum(
        int(count * stored_itemsize(param, shape, itemsize, in_fp8=in_fp8) * _numbers(param, shape))
        for param, count in counted_params(shape)
    )


def stored_itemsize(param: Param, shape: ModelShape, itemsize: int, *, in_fp8: bool = False) -> float:
    """The bytes of each number of a parameter.

    itemsize: of the model's dtype.  in_fp8: as servers in fp8 have it, with its share of the scales.
    """
    if param.keeps_float32:
        return FLOAT
    if in_fp8 and all(is_quantized(name, size) for name, size in param.hf_shapes(shape).items()):
        return 1 + FLOAT / prod(FP8_BLOCK)
    return itemsize


@cache
def largest_tensor(shape: ModelShape) -> int:
    """The number of elements of the largest tensor, as a bucket of a weight sync has it."""
    return max(sum(map(prod, param.hf_shapes(shape).values())) for param, _ in counted_params(shape))


def _numbers(param: Param, shape: ModelShape) -> int:
    return prod(param.joined_shape(shape))
