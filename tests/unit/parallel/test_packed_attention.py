"""Attention over packed sequences on a CPU against one sequence, head and token after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scalerl.parallel.attention import PackedAttention, attend_in_sequences
from scalerl.parallel.micro_batch import Packing

# With the number of calls. Two of one length apart from each other, one token alone, and an empty sequence, as padding
# may be; and the shortest first, as in a micro-batch, with padding behind.
LENGTHS = [((3, 5, 0, 3, 1), 4), ((1, 1, 3, 3, 3, 7, 7, 2), 4)]
NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM = 4, 2, 8
SCALE = 0.3


def plain_attention(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
    rows = []
    start = 0
    for length in lengths:
        for token in range(start, start + length):
            for head in range(NUM_HEADS):
                of_keys = head * NUM_KEY_HEADS // NUM_HEADS
                keys, values = (states[start : token + 1, of_keys] for states in (key, value))
                rows.append((keys @ query[token, head] * SCALE).softmax(0) @ values)
        start += length
    return torch.stack(rows).view(start, NUM_HEADS * HEAD_DIM)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sequences in each call of torch's attention."""
    attend, calls = F.scaled_dot_product_attention, []

    def counted(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(query.shape[0])
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    return calls


@pytest.mark.parametrize(("lengths", "num_calls"), LENGTHS)
def test_output_and_gradients_are_those_of_each_sequence_alone(
    lengths: tuple[int, ...], num_calls: int, calls: list[int]
) -> None:
    draw = torch.Generator().manual_seed(0)
    states = [
        torch.randn(sum(lengths), heads, HEAD_DIM, generator=draw, dtype=torch.float64, requires_grad=True)
        for heads in (NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS)
    ]
    weights = torch.randn(sum(lengths), NUM_HEADS * HEAD_DIM, generator=draw, dtype=torch.float64)
    attention = PackedAttention(SimpleNamespace(context_parallel_size=1), 1, None, "self", softmax_scale=SCALE)
    # No rotation.
    cos_sin = torch.stack([torch.ones(sum(lengths), HEAD_DIM // 2), torch.zeros(sum(lengths), HEAD_DIM // 2)])
    output = attention(*states, packed_seq_params=Packing(lengths=lengths, cos_sin=cos_sin))
    assert len(calls) == num_calls and sum(calls) == sum(length > 0 for length in lengths)
    expected = plain_attention(*states, lengths)
    torch.testing.assert_close(output, expected)
    gradients, wanted = (torch.autograd.grad((out * weights).sum(), states) for out in (output, expected))
    torch.testing.assert_close(gradients, wanted)


@pytest.mark.parametrize(("lengths", "num_calls"), [((4, 4, 4), 1), ((4, 2, 4, 1, 2, 4), 3), ((5,), 1)])
def test_sequences_that_see_what_comes_after(lengths: tuple[int, ...], num_calls: int, calls: list[int]) -> None:
    """As windows of a picture, of which those at its edges are smaller: a call for each length."""
    draw = torch.Generator().manual_seed(0)
    states = [torch.randn(sum(lengths), NUM_HEADS, HEAD_DIM, generator=draw, dtype=torch.float64) for _ in range(3)]
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    parts = zip(*(x.split(lengths) for x in states), strict=True)
    expected = torch.cat(
        [
            F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part), scale=SCALE).transpose(0, 1)
            for part in parts
        ]
    )
    calls.clear()
    torch.testing.assert_close(attend_in_sequences(*states, bounds, max(lengths), SCALE), expected)
    assert len(calls) == num_calls
