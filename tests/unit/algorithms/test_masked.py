"""Masked statistics against numpy on the kept elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalerl.algorithms.masked import masked_mean, masked_var, whiten_selected

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
def test_whiten_equals_numpy_and_zeroes_the_rest(case):
    values, mask = case
    kept = values[mask].numpy()
    var = kept.var(ddof=1) if len(kept) > 1 else 0.0
    got = whiten_selected(values, mask)
    assert (got[~mask] == 0).all()
    if len(kept):
        want = (kept - kept.mean()) / math.sqrt(var + 1e-8)
        np.testing.assert_allclose(got[mask].numpy(), want, rtol=1e-9, atol=1e-9)


def test_whiten_by_statistics_of_some_of_the_kept():
    values, mask = torch.tensor([1.0, 3.0, 9.0, math.nan]), torch.tensor([True, True, True, False])
    got = whiten_selected(values, mask, counted=torch.tensor([True, True, False, True]))
    want = (values.numpy()[:3] - 2) / math.sqrt(2 + 1e-8)
    np.testing.assert_allclose(got.numpy(), [*want, 0], rtol=1e-6)


@pytest.mark.parametrize("function", [masked_mean, masked_var, whiten_selected])
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
