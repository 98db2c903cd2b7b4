"""What a layer does number by number, in float32 on a CPU: in blocks of rows that a core's cache holds.

Operation by operation autograd goes through memory a dozen times, and keeps more. Here gradients are by hand: forward
passes have torch's numbers, bit for bit but for a rotation's last bit; the sums in gradients are of another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Numbers of a block: 128 KiB in float32, of which a core's cache holds the handful that a gradient needs.
_BLOCK = 32768


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each tensor, block by block, as the first one's rows are wide."""
    num_rows = max(1, _BLOCK // max(1, tensors[0][:1].numel()))
    return zip(*(tensor.split(num_rows) for tensor in tensors), strict=True)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: gate_up [..., 2 * ffn], gate then up -> [..., ffn] (arXiv 2002.05202)."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        ffn = gate_up.shape[-1] // 2
        product = gate_up.new_empty(*gate_up.shape[:-1], ffn)
        for rows, out in _blocks(gate_up.flatten(0, -2), product.view(-1, ffn)):
            torch.ops.aten.silu.out(rows[:, :ffn], out=out)
            out.mul_(rows[:, ffn:])
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        ffn = gate_up.shape[-1] // 2
        gradient = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        for rows, grad, out in _blocks(gate_up.flatten(0, -2), grads[0].reshape(-1, ffn), gradient.view(-1, 2 * ffn)):
            gate, up = rows.chunk(2, dim=1)
            torch.mul(grad, torch.nn.functional.silu(gate), out=out[:, ffn:])
            torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=out[:, :ffn])
        return gradient


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim, as torch.nn.functional.rms_norm."""
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        x_NH = x.reshape(-1, x.shape[-1])
        normed_NH = x_NH.new_empty(x_NH.shape)
        inverse_N1 = x_NH.new_empty(len(x_NH), 1)
        for rows, inverse, out in _blocks(x_NH, inverse_N1, normed_NH):
            torch.mean(torch.mul(rows, rows, out=out), -1, keepdim=True, out=inverse)
            inverse.add_(eps).rsqrt_()
            torch.mul(rows, inverse, out=out).mul_(weight_H)
        ctx.save_for_backward(x_NH, weight_H, inverse_N1)
        return normed_NH.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_NH, weight_H, inverse_N1 = ctx.saved_tensors
        gradient, of_weight_H = x_NH.new_empty(x_NH.shape), torch.zeros_like(weight_H)
        for rows, inverse, grad, out in _blocks(x_NH, inverse_N1, grads[0].reshape(x_NH.shape), gradient):
            unit = rows * inverse
            of_unit = grad * unit
            of_weight_H += of_unit.sum(0)
            along = of_unit.mul_(weight_H).mean(-1, keepdim=True)
            torch.mul(grad, weight_H, out=out).addcmul_(unit, along, value=-1).mul_(inverse)
        return gradient.view(grads[0].shape), of_weight_H, None


def rotate_in_blocks(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotates x [T, heads, d] as `rotary.rotate_pairs`, by cos_sin [2, T, d / 2]."""
    return _Rotation.apply(x, cos_sin)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos_sin)
        return _turned(x, cos_sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (cos_sin,) = ctx.saved_tensors
        return _turned(grads[0], cos_sin, -1), None


def _turned(x: Tensor, cos_sin: Tensor, sign: int) -> Tensor:
    """Pairs of x turned by their angles, or with sign -1 back."""
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cosines, sines = cos_sin[:, :, None]
    for rows, cos, sin, out in _blocks(x, cosines, sines, turned):
        (first, second), (to_first, to_second) = rows.chunk(2, dim=-1), out.chunk(2, dim=-1)
        torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-sign)
        torch.mul(second, cos, out=to_second).addcmul_(first, sin, value=sign)
    return turned
