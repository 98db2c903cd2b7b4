from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scalerl.tracking.metrics import Metric, merge_metrics, to_floats

finite = st.floats(-1e6, 1e6)
smallest_weight = 0.1
weights = st.floats(smallest_weight, 1e4)


def test_each_reduction_merges_by_its_own_rule():
    merged = merge_metrics(
        [
            {"loss": Metric(1.0, "mean", 3), "peak": Metric(7, "max"), "low": Metric(4, "min"), "n": Metric(2, "sum")},
            {"loss": Metric(5.0, "mean", 1), "peak": Metric(9, "max"), "low": Metric(6, "min"), "n": Metric(5, "sum")},
            {},
            {"only_here": Metric(8, "mean", 2)},
        ]
    )
    assert to_floats(merged) == {"loss": 2.0, "peak": 9.0, "low": 4.0, "n": 7.0, "only_here": 8.0}
    assert merged["loss"].weight == 4


@given(st.lists(st.tuples(finite, weights), min_size=1, max_size=12), st.integers(0, 12))
@example([(5e-324, smallest_weight), (1e-323, smallest_weight)], 1)
def test_mean_does_not_depend_on_how_the_parts_are_grouped(parts, cut):
    metrics = [{"m": Metric(value, "mean", weight)} for value, weight in parts]
    halves = [merge_metrics(metrics[:cut]), merge_metrics(metrics[cut:])]
    expected = sum(v * w for v, w in parts) / sum(w for _, w in parts)
    scale = max(abs(v) for v, _ in parts)
    # Below the normal floats all are multiples of this one, to which products with a weight and means are rounded.
    rounded = math.ulp(0.0)
    allowed = 1e-12 * scale + 2 * (rounded / smallest_weight + rounded)
    for merged in (merge_metrics(metrics), merge_metrics(halves)):
        assert merged["m"].value == pytest.approx(expected, rel=1e-9, abs=allowed)


@given(finite, st.lists(weights, min_size=1, max_size=8))
def test_a_value_that_all_ranks_agree_on_is_kept_exactly(value, ws):
    assert merge_metrics({"lr": Metric(value, "mean", w)} for w in ws)["lr"].value == value


def test_a_mean_of_nothing_does_not_count_and_alone_is_nan():
    parts = [{"m": Metric(math.nan, "mean", 0)}, {"m": Metric(2.0, "mean", 5)}]
    assert merge_metrics(parts)["m"] == Metric(2.0, "mean", 5)
    assert math.isnan(merge_metrics(parts[:1])["m"].value)


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min"])
@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_of_one_rank_is_never_hidden(reduction, values):
    assert math.isnan(merge_metrics({"m": Metric(v, reduction)} for v in values)["m"].value)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("values", "total"),
    [((math.inf, -math.inf), math.nan), ((1e308, 1.7e308), math.inf), ((-math.inf, 1.0), -math.inf)],
)
def test_infinities_and_overflow_are_values_not_errors(reduction, values, total):
    merged = merge_metrics({"m": Metric(v, reduction)} for v in values)["m"].value
    assert merged == total or (math.isnan(merged) and math.isnan(total))


def test_parts_that_disagree_on_the_reduction_are_refused():
    with pytest.raises(ValueError, match=r"'m' has different reductions.*max, mean"):
        merge_metrics([{"m": Metric(1, "mean")}, {"m": Metric(1, "max")}])
