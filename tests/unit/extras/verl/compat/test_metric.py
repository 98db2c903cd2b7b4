from __future__ import annotations

import numpy as np
import pytest

from scalerl.extras.verl.compat import append_to_dict, reduce_metrics
from scalerl.tracking.metrics import Metric


def test_plain_lists_reduce_by_name():
    metrics = {"loss": [1.0, 2.0, 3.0], "accuracy": [0.8, 0.9, 0.7], "max_reward": [5, 8, 6], "min_error": [0.1, 0.05]}
    reduced = reduce_metrics(metrics)
    assert reduced == pytest.approx({"loss": 2.0, "accuracy": 0.8, "max_reward": 8.0, "min_error": 0.05})
    assert metrics["loss"] == [1.0, 2.0, 3.0]


def test_the_first_word_of_a_name_decides_and_a_number_is_a_list_of_one():
    assert reduce_metrics({"minmax_diff": [1.0, 3.0], "a/min": np.array([2, 1]), "step": 7}) == {
        "minmax_diff": 3.0,
        "a/min": 1.0,
        "step": 7.0,
    }


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


def test_append_to_dict_makes_lists_without_a_prefix():
    data = {}
    for loss in (1.0, 2.0):
        append_to_dict(data, {"loss": loss})
    append_to_dict(data, {"lr": 0.5})
    assert data == {"loss": [1.0, 2.0], "lr": [0.5]}
    assert reduce_metrics(data) == {"loss": 1.5, "lr": 0.5}
