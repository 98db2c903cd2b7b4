"""Attention with sinks and windows on CUDA (one variable-length flash call) and biased experts, against float64.

What one H100 gave by the same calls (torch 2.11): 3e-3 for outputs and all gradients of attention.

    python -m pytest tests/gpu/test_sink_attention.py -q
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from scalerl.batch.data_proto import cu_seqlens_of
from scalerl.parallel import experts
from scalerl.parallel.micro_batch import Packing
from scalerl.parallel.sink_attention import SinkAttention, by_definition

LENGTHS = (1, 7, 128, 129, 700)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 2, 64
# As in test_packed_attention.py.
FORWARD_BOUND, GRADIENT_BOUND = 0.01, 0.02


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.parametrize("window", [None, 128, 1])
def test_attention_with_sinks(window: int | None) -> None:
    torch.manual_seed(0)
    shapes = [(sum(LENGTHS), heads, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    query, key, value = (torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes)
    grad = torch.randn(sum(LENGTHS), NUM_HEADS * HEAD_DIM, device="cuda").bfloat16()
    config = SimpleNamespace(
        context_parallel_size=1,
        num_attention_heads=NUM_HEADS,
        tensor_model_parallel_size=1,
        params_dtype=torch.bfloat16,
    )
    attention = SinkAttention(config, 1, None, "self", windows=(window,)).cuda()
    torch.nn.init.normal_(attention.sinks)
    ours = (query, key, value, attention.sinks)
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    packing = Packing(cu_seqlens_q=cu_seqlens_of(LENGTHS).cuda().int(), max_seqlen_q=max(LENGTHS), lengths=LENGTHS)
    out = attention(query, key, value, packed_seq_params=packing)
    expected = by_definition(*exact, LENGTHS, window, HEAD_DIM**-0.5).flatten(1)
    assert relative(out, expected) < FORWARD_BOUND
    grads, wanted = torch.autograd.grad(out, ours, grad), torch.autograd.grad(expected, exact, grad.double())
    for name, mine, theirs in zip(("query", "key", "value", "sinks"), grads, wanted, strict=True):
        assert relative(mine, theirs) < GRADIENT_BOUND, name


def test_biased_experts_in_grouped_products() -> None:
    """Within the bounds of the activation, where rounding changes no slope."""
    torch.manual_seed(0)
    counts = torch.tensor([0, 300, 1, 99, 200, 100, 0, 200])
    tokens, weight, bias = (
        (scale * torch.randn(shape, device="cuda")).bfloat16().requires_grad_()
        for shape, scale in (((900, 64), 1.0), ((8, 128, 64), 0.1), ((8, 128), 1.0))
    )
    exact = [tensor.detach().double().requires_grad_() for tensor in (tokens, weight, bias)]
    grad = torch.randn(900, 64, device="cuda").bfloat16()
    out = experts._compiled_clamped_glu()(experts._grouped_linear(tokens, counts, weight, bias))
    expected = experts.clamped_glu(experts._linear_one_by_one(exact[0], counts, exact[1], exact[2]))
    assert relative(out, expected) < FORWARD_BOUND
    grads = torch.autograd.grad(out, (tokens, weight, bias), grad)
    for mine, theirs in zip(grads, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        assert relative(mine, theirs) < GRADIENT_BOUND
