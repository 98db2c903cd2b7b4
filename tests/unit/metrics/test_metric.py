from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl.metrics import Metric, append_to_dict, merge_metrics, reduce_metrics, to_floats

finite = st.floats(-1e6, 1e6)
weights = st.floats(0.1, 1e4)


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


@given(st.lists(st.tuples(finite, weights), min_size=1, max_size=12), st.data())
def test_mean_does_not_depend_on_how_the_parts_are_grouped(parts, data):
    metrics = [{"m": Metric(value, "mean", weight)} for value, weight in parts]
    cut = data.draw(st.integers(0, len(metrics)))
    halves = [merge_metrics(metrics[:cut]), merge_metrics(metrics[cut:])]
    expected = sum(v * w for v, w in parts) / sum(w for _, w in parts)
    scale = max(abs(v) for v, _ in parts)
    for merged in (merge_metrics(metrics), merge_metrics(halves)):
        assert merged["m"].value == pytest.approx(expected, rel=1e-9, abs=1e-12 * scale)


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


@pytest.mark.parametrize(("kwargs", "problem"), [({"reduction": "avg"}, "avg"), ({"weight": -1}, "weight")])
def test_metric_refuses_what_it_cannot_reduce(kwargs, problem):
    with pytest.raises(ValueError, match=problem):
        Metric(1.0, **{"reduction": "mean"} | kwargs)


def test_plain_lists_reduce_by_name():
    metrics = {"loss": [1.0, 2.0, 3.0], "accuracy": [0.8, 0.9, 0.7], "max_reward": [5, 8, 6], "min_error": [0.1, 0.05]}
    reduced = reduce_metrics(metrics)
    assert reduced == pytest.approx({"loss": 2.0, "accuracy": 0.8, "max_reward": 8.0, "min_error": 0.05})
    assert metrics["loss"] == [1.0, 2.0, 3.0]


def test_a_metric_reduces_by_itself_whatever_its_name_says():
    assert reduce_metrics({"minmax_diff": [Metric(1, "mean"), Metric(3, "mean")]}) == {"minmax_diff": 2.0}


@pytest.mark.parametrize(("values", "problem"), [([], "'k' has an empty list"), ([1.0, Metric(1, "max")], "'k' mixes")])
def test_lists_that_cannot_be_reduced_name_their_key(values, problem):
    with pytest.raises(ValueError, match=problem):
        reduce_metrics({"k": values})


def test_append_to_dict_prefixes_once_and_appends_in_place():
    data = {"actor/loss": [1.0]}
    assert append_to_dict(data, {"loss": 2.0, "actor/lr": 3.0, "list": [4, 5]}, prefix="actor/") is None
    assert data == {"actor/loss": [1.0, 2.0], "actor/lr": [3.0], "actor/list": [[4, 5]]}
