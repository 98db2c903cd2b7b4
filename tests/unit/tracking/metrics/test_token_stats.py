from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from scalerl.tracking.metrics import (
    Metric,
    explained_variance_metrics,
    explained_variance_sums,
    merge_metrics,
    to_floats,
    token_stat_sums,
)

EXPLAINED = "critic/vf_explained_var"
CUTS = [(), (40,), (1, 2, 60, 60), (0, 99)]


def tokens(num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """values, returns, mask."""
    generator = torch.Generator().manual_seed(0)
    returns = 2 + torch.randn(num, generator=generator)
    values = 0.5 * returns + 0.3 * torch.randn(num, generator=generator)
    return values, returns, torch.rand(num, generator=generator) < 0.7


def explained(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, cuts: tuple[int, ...] = ()):
    pieces = zip(*(column.tensor_split(list(cuts)) for column in (values, returns, mask)), strict=True)
    return to_floats(explained_variance_metrics(merge_metrics(explained_variance_sums(*piece) for piece in pieces)))


@pytest.mark.parametrize("cuts", CUTS)
def test_statistics_do_not_depend_on_the_split_over_ranks(cuts):
    values, _, mask = tokens(100)
    pieces = zip(*(column.tensor_split(list(cuts)) for column in (values, mask)), strict=True)
    metrics = merge_metrics(token_stat_sums("critic/values", *piece) for piece in pieces)
    kept = values.double().numpy()[mask.numpy()]
    assert to_floats(metrics) == pytest.approx(
        {"critic/values/mean": kept.mean(), "critic/values/max": kept.max(), "critic/values/min": kept.min()}, rel=1e-12
    )
    assert metrics["critic/values/mean"].weight == len(kept)


@pytest.mark.parametrize("cuts", CUTS)
def test_explained_variance_does_not_depend_on_the_split_over_ranks(cuts):
    values, returns, mask = tokens(100)
    v, r = (column.double().numpy()[mask.numpy()] for column in (values, returns))
    want = 1 - np.var(r - v, ddof=1) / (np.var(r, ddof=1) + 1e-5)
    assert 0.3 < want < 0.9
    assert explained(values, returns, mask, cuts) == pytest.approx({EXPLAINED: want}, rel=1e-9)


def test_explained_variance_by_hand():
    # Errors of variance 2, returns of variance 8.
    returns, errors = torch.tensor([0.0, 4.0]), torch.tensor([1.0, 3.0])
    metrics = explained(returns - errors, returns, torch.ones(2))
    assert metrics[EXPLAINED] == pytest.approx(1 - 2 / (8 + 1e-5), rel=1e-12)


@pytest.mark.parametrize("value", [1e6 + 0.1, 1e18])
def test_equal_returns_have_no_variance_however_large(value):
    # The difference of two large equal sums is noise, here of the order of 1e-4 and more.
    returns = torch.full((1001,), value)
    assert explained(returns.clone(), returns, torch.ones(1001))[EXPLAINED] == 1.0
    wrong = returns + torch.arange(1001) % 2
    want = 1 - float((returns - wrong).double().var()) / 1e-5
    assert explained(wrong, returns, torch.ones(1001), (300,))[EXPLAINED] == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_token_that_is_not_finite_shows(poison):
    values, returns, mask = tokens(50)
    values[int(mask.nonzero()[0])] = poison
    assert math.isnan(explained(values, returns, mask, (10,))[EXPLAINED])
    assert not math.isfinite(token_stat_sums("a", values, mask)["a/max"].value)


def test_without_tokens_there_is_nothing_to_say():
    nothing = torch.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.bool)
    assert token_stat_sums("a", nothing[0], nothing[2]) == {}
    assert explained(*nothing) == {}
    # A rank without tokens changes nothing for the others.
    some = tokens(20)
    merged = merge_metrics([explained_variance_sums(*nothing), explained_variance_sums(*some)])
    assert to_floats(explained_variance_metrics(merged)) == explained(*some)


def test_one_token_has_statistics_and_no_variance():
    one = torch.tensor([2.0]), torch.tensor([3.0]), torch.ones(1)
    assert to_floats(token_stat_sums("a", one[0], one[2])) == {"a/mean": 2.0, "a/max": 2.0, "a/min": 2.0}
    assert explained(*one) == {}


def test_float32_means_do_not_lose_small_values():
    values = torch.tensor([1e8, 1.0, -1e8])
    assert token_stat_sums("a", values, torch.ones(3))["a/mean"].value == pytest.approx(1 / 3, rel=1e-12)


def test_columns_with_a_gradient_are_read_without_it():
    values, returns, mask = tokens(20)
    assert explained_variance_sums(values.clone().requires_grad_(), returns, mask) == explained_variance_sums(
        values, returns, mask
    )
    assert token_stat_sums("a", values.clone().requires_grad_(), mask) == token_stat_sums("a", values, mask)


def test_other_metrics_pass_through():
    other = {"critic/vf_loss": Metric(1.0, "mean"), "perf/x": 2.0}
    assert explained_variance_metrics(other) == other
    assert explained_variance_metrics(other | explained_variance_sums(*tokens(9))).keys() == other.keys() | {EXPLAINED}
