"""Samples without a score: wrong in every mean, whatever else is scored on whatever scale."""

from __future__ import annotations

import numpy as np
import pytest

from scalerl.tracking.metrics import validation_metrics
from scalerl.tracking.metrics.failed_samples import as_wrong, with_wrong_extras

SOURCES = ["zero", "one", "zero", "one", "one", "zero", "none"]
FAILED = [False, True, True, False, False, False, True]


def test_a_failed_sample_has_0_or_the_lowest_of_its_data_source() -> None:
    scores = [1.0, 0.0, 0.0, -1.0, 1.0, 0.5, 0.0]
    assert as_wrong(scores, SOURCES, FAILED).tolist() == [1.0, -1.0, 0.0, -1.0, 1.0, 0.5, 0.0]
    assert as_wrong(scores, SOURCES, [False] * 7).tolist() == scores
    # A reward model has not scored its samples yet.
    assert as_wrong([0.0, np.nan, -2.0], ["a"] * 3, [True, False, False]).tolist()[0] == -2.0


def test_beside_the_score_it_has_what_all_scored_ones_of_its_source_have() -> None:
    scored = [{"acc": True, "part": -3, "pred": 7, "x": 1}, {"acc": True, "part": 2.0, "pred": "", "why": "text"}]
    extras = [*scored, {}, {"part": 1.0}]
    filled = with_wrong_extras(extras, ["a"] * 4, [False, False, True, True])
    assert filled[:2] == scored
    assert filled[2] == {"acc": 0.0, "part": -3.0, "pred": ""}
    assert filled[3] == {"acc": 0.0, "part": 1.0, "pred": ""} and extras[2:] == [{}, {"part": 1.0}]
    assert with_wrong_extras([{}, {"acc": 1}], ["a", "b"], [True, False]) == [{}, {"acc": 1}]


@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_a_validation_keeps_its_metrics_when_a_sample_fails_and_counts_it_as_wrong(wrong: float) -> None:
    sources, uids = ["a"] * 6, [0, 0, 0, 1, 1, 1]
    right = [True, False, True, False, False, True]
    failed = [False, False, False, False, True, False]
    scores = [1.0 if correct else wrong for correct in right]
    known = [{"acc": correct, "pred": "4" if correct else "", "format": 1} for correct in right]
    without = validation_metrics(sources, uids, scores, known)
    known[4] = {}
    with_one = validation_metrics(sources, uids, as_wrong(scores, sources, failed), known, failed)
    assert {"val-core/a/acc/mean@3", "val-core/a/acc/maj@3/mean", "val-core/a/acc/pass@3"} <= with_one.keys()
    differs = {key for key in without if with_one[key] != without[key]}
    # As of a wrong answer without an answer, but for a number that says nothing of right and wrong.
    assert with_one.pop("val-core/a/num_failed") == 1.0
    assert with_one.keys() == without.keys() and {key.split("/")[2] for key in differs} == {"format"}
