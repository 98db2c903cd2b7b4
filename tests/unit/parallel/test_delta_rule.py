"""The gated delta rule over packed sequences, against one token after the other in float64."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scalerl.parallel.delta_rule import CHUNK, causal_conv, gated_delta_rule

KEYS, REPEAT, KEY_DIM, VALUE_DIM, TAPS = 2, 3, 6, 5, 4
HEADS = KEYS * REPEAT
# Around whole chunks, and shorter than the convolution.
LENGTHS = st.lists(
    st.sampled_from([1, 2, 3, 5, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 9]), min_size=1, max_size=5
)


def inputs(num_tokens: int, seed: int = 0) -> list[Tensor]:
    """query, key, value, decay, strength of the tokens, which need gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(num_tokens, *size, generator=generator)

    tensors = [
        draw(KEYS, KEY_DIM),
        draw(KEYS, KEY_DIM),
        draw(HEADS, VALUE_DIM),
        -0.2 * draw(HEADS).exp(),
        draw(HEADS).sigmoid(),
    ]
    return [tensor.requires_grad_() for tensor in tensors]


def one_by_one(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
    """The rule as it is defined, of one sequence."""
    state = value.new_zeros(HEADS, KEY_DIM, VALUE_DIM)
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(REPEAT, dim=1) for x in (query * KEY_DIM**-0.5, key))
    outputs = []
    for q, k, v, g, b in zip(query, key, value, decay, strength, strict=True):
        state = g.exp()[:, None, None] * state
        error = b[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + torch.einsum("hk,hv->hkv", k, error)
        outputs.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(outputs)


@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_a_packed_row_is_each_sequence_alone(lengths: list[int], seed: int) -> None:
    """Outputs and gradients, at every split of the row into sequences."""
    packed = inputs(sum(lengths), seed)
    exact = [tensor.detach().double().requires_grad_() for tensor in packed]
    weights = torch.randn(sum(lengths), HEADS, VALUE_DIM, generator=torch.Generator().manual_seed(seed + 1))
    out = gated_delta_rule(*packed, tuple(lengths))
    expected = torch.cat([one_by_one(*parts) for parts in zip(*(x.split(lengths) for x in exact), strict=True)])
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    gradients = torch.autograd.grad((out * weights).sum(), packed)
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    for gradient, exactly in zip(gradients, wanted, strict=True):
        assert float((gradient - exactly).norm()) <= 1e-5 * float(exactly.norm())


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_the_convolution_sees_no_other_sequence(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    channels, weight = torch.randn(sum(lengths), 7, generator=generator), torch.randn(7, TAPS, generator=generator)
    out = causal_conv(channels, weight, tuple(lengths))
    for alone, mine in zip(channels.split(lengths), out.split(lengths), strict=True):
        conv = torch.nn.functional.conv1d(alone.T[None], weight[:, None], padding=TAPS - 1, groups=7)[
            0, :, : len(alone)
        ]
        torch.testing.assert_close(mine, torch.nn.functional.silu(conv).T, rtol=1e-6, atol=1e-6)


def test_a_token_of_another_sequence_changes_nothing() -> None:
    """Bit for bit: a number of another sequence has no way into this one."""
    lengths = (CHUNK + 3, 70, 5)
    packed, other = inputs(sum(lengths)), inputs(sum(lengths))
    with torch.no_grad():
        for tensor in other:
            tensor[: lengths[0]] *= 0.5
    ours, theirs = (gated_delta_rule(*tensors, lengths) for tensors in (packed, other))
    assert torch.equal(ours[lengths[0] :], theirs[lengths[0] :])
    assert not torch.equal(ours[: lengths[0]], theirs[: lengths[0]])


def test_numbers_of_bfloat16_have_a_state_of_float32() -> None:
    packed = inputs(150)
    half = [x.detach().bfloat16() if number < 3 else x for number, x in enumerate(packed)]
    rounded = [x.float() for x in half]
    out = gated_delta_rule(*half, (150,))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, gated_delta_rule(*rounded, (150,)).bfloat16(), rtol=0, atol=0)
