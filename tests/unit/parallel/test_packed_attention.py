"""Attention over packed sequences on a CPU against one sequence, head and token after the other."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from scalerl.parallel.attention import PackedAttention
from scalerl.parallel.micro_batch import Packing

# Two of one length apart from each other, one token alone, and an empty sequence, as padding may be.
LENGTHS = (3, 5, 0, 3, 1)
NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM = 4, 2, 8
SCALE = 0.3


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    rows = []
    start = 0
    for length in LENGTHS:
        for token in range(start, start + length):
            for head in range(NUM_HEADS):
                of_keys = head * NUM_KEY_HEADS // NUM_HEADS
                keys, values = (states[start : token + 1, of_keys] for states in (key, value))
                rows.append((keys @ query[token, head] * SCALE).softmax(0) @ values)
        start += length
    return torch.stack(rows).view(start, NUM_HEADS * HEAD_DIM)


def test_output_and_gradients_are_those_of_each_sequence_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    states = [
        torch.randn(sum(LENGTHS), heads, HEAD_DIM, generator=draw, dtype=torch.float64, requires_grad=True)
        for heads in (NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS)
    ]
    weights = torch.randn(sum(LENGTHS), NUM_HEADS * HEAD_DIM, generator=draw, dtype=torch.float64)
    attention = PackedAttention(SimpleNamespace(context_parallel_size=1), 1, None, "self", softmax_scale=SCALE)
    # No rotation.
    cos_sin = torch.stack([torch.ones(sum(LENGTHS), HEAD_DIM // 2), torch.zeros(sum(LENGTHS), HEAD_DIM // 2)])
    output = attention(*states, packed_seq_params=Packing(lengths=LENGTHS, cos_sin=cos_sin))
    expected = plain_attention(*states)
    torch.testing.assert_close(output, expected)
    gradients, wanted = (torch.autograd.grad((out * weights).sum(), states) for out in (output, expected))
    torch.testing.assert_close(gradients, wanted)
