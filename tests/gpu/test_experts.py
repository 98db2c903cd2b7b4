"""A rank's experts on CUDA (grouped matrix products) against one expert after the other in float32.

NOT RUN YET on a GPU: written from torch's sources on a machine without one; the same functions run on the CPU in
tests/unit/parallel/test_experts.py. Run: pytest tests/gpu/test_experts.py
"""

from __future__ import annotations

import pytest
import torch

from scalerl.parallel.experts import grouped, one_by_one

EXPERTS, HIDDEN, FFN = 8, 256, 128
# bfloat16 rounds each number by up to 2^-9 = 0.002 of itself; a few such errors follow each other.
FORWARD_BOUND, GRADIENT_BOUND = 0.01, 0.02


@pytest.mark.parametrize("sizes", [(64, 1, 300, 17, 2, 90, 33, 5), (0, 700, 0, 0, 5, 0, 0, 1)])
def test_grouped_experts(sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(sizes), HIDDEN), (EXPERTS, 2 * FFN, HIDDEN), (EXPERTS, HIDDEN, FFN)]
    drawn = [(torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(torch.bfloat16) for shape in shapes]
    weights_N = torch.rand(sum(sizes), generator=generator)
    upstream = torch.randn(sum(sizes), HIDDEN, generator=generator).to(torch.bfloat16)
    outputs_and_gradients = []
    for compute, device, dtype in ((grouped, "cuda", torch.bfloat16), (one_by_one, "cpu", torch.float32)):
        inputs = [tensor.to(device, dtype).requires_grad_() for tensor in drawn]
        out = compute(inputs[0], torch.tensor(sizes), weights_N.to(device), *inputs[1:])
        gradients = torch.autograd.grad(out, inputs, upstream.to(device, dtype))
        outputs_and_gradients.append([tensor.float().cpu() for tensor in (out, *gradients)])
    for mine, theirs, bound in zip(*outputs_and_gradients, (FORWARD_BOUND, *[GRADIENT_BOUND] * 3), strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < bound
