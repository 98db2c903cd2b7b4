from __future__ import annotations

import pytest

from scalerl.rewards import RewardError, default_compute_score, math_dapo, multiple_choice, register_reward


@pytest.mark.parametrize("data_source", ["math", "math_dapo", "math_dapo_reasoning", "aime2024"])
def test_dapo_scores_are_1_and_minus_1(data_source):
    right, wrong = (default_compute_score(data_source, f"Answer: {number}", "42") for number in (42, 41))
    assert right == {"score": 1.0, "acc": True, "pred": "42"}
    assert wrong == {"score": -1.0, "acc": False, "pred": "41"}


def test_dapo_pred_is_one_text_for_equal_answers():
    assert {math_dapo.compute_score(f"Answer: {a}", "1")["pred"] for a in ("1,000", "1000.0", r"\$1000", "1000")} == {
        "1000"
    }
    with pytest.raises(RewardError, match="ground truth is empty"):
        math_dapo.compute_score("Answer: 1", " ")


def test_an_exact_name_comes_before_a_pattern():
    register_reward("aime_test_exact")(lambda *_: 0.25)
    assert default_compute_score("aime_test_exact", "Answer: 7", "7") == 0.25


def test_multiple_choice_truth():
    assert multiple_choice.compute_score("Answer: B", "(B)") == {"score": 1.0, "acc": True, "pred": "B"}
    assert multiple_choice.compute_score("none", "B") == {"score": 0.0, "acc": False, "pred": ""}
    with pytest.raises(RewardError, match=r"ground truth 1 is no letter"):
        multiple_choice.compute_score("Answer: B", 1)
