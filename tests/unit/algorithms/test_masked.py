"""Masked statistics against numpy on the kept elements; label log-probabilities against log_softmax."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalerl.algorithms import masked
from scalerl.algorithms.masked import logprobs_from_logits, masked_mean, masked_var, masked_whiten

POISON = [math.nan, math.inf]


def case(rows: int, columns: int, seed: int, poison: float) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, columns)) < 0.6
    values = np.where(mask, rng.normal(3, 2, (rows, columns)), poison)
    return torch.from_numpy(values), torch.from_numpy(mask)


cases = st.builds(case, st.integers(1, 5), st.integers(1, 6), st.integers(0, 999), st.sampled_from(POISON))


@given(cases)
def test_mean_equals_numpy_on_the_kept(case):
    values, mask = case
    kept = values[mask].numpy()
    assert masked_mean(values, mask).item() == pytest.approx(kept.mean() if len(kept) else 0.0)
    for axis in (0, 1, -1, (0, 1)):
        got = masked_mean(values, mask, axis=axis).numpy()
        with np.errstate(invalid="ignore"):
            total = np.where(mask, values, 0).sum(axis=axis)
        np.testing.assert_allclose(got, total / np.maximum(mask.numpy().sum(axis=axis), 1), rtol=1e-12)


@pytest.mark.parametrize("unbiased", [True, False])
@given(cases)
def test_var_equals_numpy_on_the_kept(unbiased, case):
    values, mask = case
    kept = values[mask].numpy()
    want = kept.var(ddof=int(unbiased)) if len(kept) > int(unbiased) else 0.0
    assert masked_var(values, mask, unbiased=unbiased).item() == pytest.approx(want, abs=1e-12)


@given(cases)
def test_whiten_equals_numpy_and_zeroes_the_masked(case):
    values, mask = case
    kept = values[mask].numpy()
    var = kept.var(ddof=1) if len(kept) > 1 else 0.0
    for shift_mean in (True, False):
        got = masked_whiten(values, mask, shift_mean=shift_mean)
        assert (got[~mask] == 0).all()
        if len(kept):
            want = (kept - kept.mean()) / math.sqrt(var + 1e-8) + (0.0 if shift_mean else kept.mean())
            np.testing.assert_allclose(got[mask].numpy(), want, rtol=1e-9, atol=1e-9)


def test_whiten_does_not_depend_on_order():
    values, mask = case(4, 6, 3, math.nan)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        masked_whiten(values.flatten()[order], mask.flatten()[order]), masked_whiten(values, mask).flatten()[order]
    )


@pytest.mark.parametrize("function", [masked_mean, masked_var, masked_whiten])
def test_masked_elements_get_no_gradient(function):
    values = torch.tensor([1.0, math.nan, 3.0, 7.0], requires_grad=True)
    function(values, torch.tensor([True, False, True, True])).pow(2).sum().backward()
    assert values.grad.isfinite().all()
    assert values.grad[1] == 0


def test_numeric_masks_are_weights():
    assert masked_mean(torch.tensor([1.0, 5.0]), torch.tensor([0.25, 0.25])).item() == 3.0
    assert masked_mean(torch.tensor([1.0, 5.0]), torch.tensor([3, 1])).item() == 2.0


def test_shapes_must_match():
    with pytest.raises(ValueError, match=r"values \(2, 3\) and mask \(3,\)"):
        masked_mean(torch.zeros(2, 3), torch.ones(3))


# Label log-probabilities


def logits_and_labels(shape: tuple[int, ...], vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(*shape, vocab_size, generator=generator, dtype=torch.float64) * 5).to(dtype)
    return logits, torch.randint(vocab_size, shape, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,)])
@pytest.mark.parametrize("chunk_elements", [1, 22, 1 << 26])
def test_logprobs_equal_log_softmax(dtype, shape, chunk_elements, monkeypatch):
    monkeypatch.setattr(masked, "_CHUNK_ELEMENTS", chunk_elements)
    logits, labels = logits_and_labels(shape, 11, dtype)
    got = logprobs_from_logits(logits, labels)
    want = logits.double().log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("inplace", [False, True])
def test_gradient_equals_autograd_of_log_softmax(inplace):
    leaf, labels = logits_and_labels((4, 3), 7, torch.float64)
    grad = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    leaf.requires_grad_()
    leaf.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1).backward(grad)
    want, leaf.grad = leaf.grad, None
    logits = leaf * 1.0
    before = logits.detach().clone()
    logprobs_from_logits(logits, labels, inplace_backward=inplace).backward(grad)
    torch.testing.assert_close(leaf.grad, want)
    # In place: the memory of the logits now holds their gradient. Otherwise they are as they were.
    torch.testing.assert_close(logits.detach(), want if inplace else before)


def test_inplace_backward_never_gives_another_operation_wrong_logits():
    leaf, labels = logits_and_labels((4,), 7, torch.float32)
    logits = leaf.requires_grad_() * 1.0
    # exp's gradient is computed from its output, square's from its input: the logits.
    loss = logits.square().sum() + logprobs_from_logits(logits, labels, inplace_backward=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_extreme_logits():
    logits = torch.tensor([[1e4, 0.0, -1e4], [-math.inf, 0.0, 0.0]])
    got = logprobs_from_logits(logits, torch.tensor([2, 1]))
    torch.testing.assert_close(got, torch.tensor([-2e4, -math.log(2)]))


def test_labels_must_match():
    with pytest.raises(ValueError, match=r"labels \(3,\).*logits \(2, 5\)"):
        logprobs_from_logits(torch.zeros(2, 5), torch.zeros(3, dtype=torch.int64))
