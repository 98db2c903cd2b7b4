"""Attention with sinks: by definition against the softmax written out, and a fused kernel's against both."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from scalerl.parallel.sink_attention import AttentionWithSinks, by_definition

LENGTHS = (1, 4, 4, 9, 23)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 8
SCALE = 0.4
WINDOWS = [None, 1, 4, 100]


class CPUKernel:
    """torch's fused attention on a CPU, which knows neither packed sequences, fewer key heads nor windows."""

    def __init__(self, window: int | None) -> None:
        self.window = window

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        out, lse = [], []
        for q, k, v in self._sequences(query, key, value):
            attended, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, attn_mask=self._mask(q), scale=SCALE
            )
            out.append(attended[0].transpose(0, 1))
            lse.append(sums[0])
        return torch.cat(out), torch.cat(lse, dim=1), ()

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *saved: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads: tuple[list[Tensor], ...] = ([], [], [])
        of_lse = lse.split(LENGTHS, dim=1)
        for (q, k, v), (g, o, _), sums in zip(
            self._sequences(query, key, value), self._sequences(grad, out, value), of_lse, strict=True
        ):
            of_sequence = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                g, q, k, v, o, sums[None], 0.0, False, attn_mask=self._mask(q), scale=SCALE
            )
            for collected, one in zip(grads, of_sequence, strict=True):
                collected.append(one[0].transpose(0, 1))
        dq, dk, dv = (torch.cat(parts) for parts in grads)
        return dq, *(x.unflatten(1, (NUM_KV_HEADS, -1)).sum(2) for x in (dk, dv))

    def _sequences(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """[1, NUM_HEADS, L, d] each."""
        whole = (x.repeat_interleave(NUM_HEADS // x.shape[1], dim=1).transpose(0, 1)[None] for x in tensors)
        return list(zip(*(x.split(LENGTHS, dim=2) for x in whole), strict=True))

    def _mask(self, query: Tensor) -> Tensor:
        back = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
        is_seen = (back >= 0) & (back < (self.window or math.inf))
        return torch.zeros(back.shape).masked_fill(~is_seen, -math.inf)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    shapes.append((NUM_HEADS,))
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [tensor.to(dtype).requires_grad_() for tensor in drawn]


def written_out(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """Token by token and head by head."""
    outputs, first = torch.zeros_like(query), 0
    for length in LENGTHS:
        for token in range(length):
            start = first + (0 if window is None else max(0, token + 1 - window))
            for head in range(NUM_HEADS):
                of_group = head // (NUM_HEADS // NUM_KV_HEADS)
                scores = key[start : first + token + 1, of_group] @ query[first + token, head] * SCALE
                weights = scores.exp() / (scores.exp().sum() + sinks[head].exp())
                outputs[first + token, head] = weights @ value[start : first + token + 1, of_group]
        first += length
    return outputs


@pytest.mark.parametrize("window", WINDOWS)
def test_by_definition_is_the_softmax_written_out(window: int | None) -> None:
    tensors = [tensor.detach() for tensor in inputs(torch.float64)]
    expected = written_out(*tensors, window)
    torch.testing.assert_close(by_definition(*tensors, LENGTHS, window, SCALE), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_fused_kernel_with_the_sum_of_the_sinks_is_exact(window: int | None) -> None:
    """Output and the gradients of queries, keys, values and sinks."""
    exact, fused = inputs(torch.float64), inputs(torch.float32)
    weights = torch.randn(sum(LENGTHS), NUM_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    expected = by_definition(*exact, LENGTHS, window, SCALE)
    out = AttentionWithSinks.apply(*fused, CPUKernel(window))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    (expected * weights).sum().backward()
    (out * weights).sum().backward()
    for ours, theirs in zip(fused, exact, strict=True):
        assert float((ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()) < 1e-6


def test_a_sink_far_below_the_scores_takes_nothing_and_one_far_above_all() -> None:
    query, key, value, _ = (tensor.detach() for tensor in inputs(torch.float64))
    none, everything = (torch.full((NUM_HEADS,), sink, dtype=torch.float64) for sink in (-1e9, 1e9))
    k, v = (x.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1) for x in (key, value))
    q, k, v = (x[-LENGTHS[-1] :].transpose(0, 1) for x in (query, k, v))
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE).transpose(0, 1)
    out = by_definition(query, key, value, none, LENGTHS, None, SCALE)
    torch.testing.assert_close(out[-LENGTHS[-1] :], plain, rtol=1e-12, atol=1e-12)
    assert not by_definition(query, key, value, everything, LENGTHS, None, SCALE).any()
