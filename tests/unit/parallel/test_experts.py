"""Experts in grouped matrix products against one after the other."""

from __future__ import annotations

import pytest
import torch

from scalerl.parallel.experts import grouped, one_by_one

EXPERTS, HIDDEN, FFN = 5, 32, 16


@pytest.mark.parametrize("sizes", [(4, 1, 9, 2, 3), (0, 7, 0, 0, 5), (6, 0, 0, 0, 0)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_grouped_experts(sizes: tuple[int, ...], dtype: torch.dtype, bound: float) -> None:
    """bfloat16 rounds each product by up to 2^-9 of itself."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(sizes), HIDDEN), (EXPERTS, 2 * FFN, HIDDEN), (EXPERTS, HIDDEN, FFN)]
    drawn = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    weights_N = torch.rand(sum(sizes), generator=generator).requires_grad_()
    upstream = torch.randn(sum(sizes), HIDDEN, generator=generator).to(dtype)
    outputs_and_gradients = []
    for compute in (grouped, one_by_one):
        out = compute(drawn[0], torch.tensor(sizes), weights_N, *drawn[1:])
        outputs_and_gradients.append([out, *torch.autograd.grad(out, (*drawn, weights_N), upstream)])
    for mine, theirs in zip(*outputs_and_gradients, strict=True):
        assert mine.dtype == theirs.dtype
        assert float((mine.float() - theirs.float()).norm() / theirs.float().norm()) < bound
