from __future__ import annotations

import pytest

from scalerl.metrics import validation_metrics


def test_one_response_per_prompt_gives_the_mean_alone():
    metrics = validation_metrics(["a", "a", "b"], [0, 1, 2], [1.0, 0.0, 0.25])
    assert metrics == {"val-core/a/reward/mean@1": 0.5, "val-core/b/reward/mean@1": 0.25}


def test_several_responses_are_grouped_by_prompt_in_any_order():
    metrics = validation_metrics(["a"] * 4, [7, 8, 7, 8], [1.0, 0.0, 0.0, 0.0])
    assert metrics == {
        "val-core/a/reward/mean@2": 0.25,
        "val-core/a/reward/best@2/mean": 0.5,
        "val-aux/a/reward/std@2": 0.25,
    }


def test_a_uid_that_two_sources_share_is_two_prompts():
    assert validation_metrics(["a", "b"], [0, 0], [1.0, 0.0]) == {
        "val-core/a/reward/mean@1": 1.0,
        "val-core/b/reward/mean@1": 0.0,
    }


def test_every_prompt_counts_once_even_when_a_response_is_missing():
    assert validation_metrics(["a"] * 3, [0, 0, 1], [1.0, 1.0, 0.0])["val-core/a/reward/mean@2"] == 0.5


@pytest.mark.parametrize(
    ("args", "problem"),
    [((["a"], [0, 1], [1.0]), "1 data sources, 2 uids"), ((["a"], [3], [float("nan")]), "prompt 3 of 'a' is nan")],
)
def test_bad_input_is_named(args, problem):
    with pytest.raises(ValueError, match=problem):
        validation_metrics(*args)
