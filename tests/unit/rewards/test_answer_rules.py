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


def test_aime_by_pattern_and_an_exact_name_before_it():
    assert default_compute_score("aime2024", "Answer: 7", "7")["score"] == 1.0
    register_reward("aime_test_exact")(lambda *_: 0.25)
    assert default_compute_score("aime_test_exact", "Answer: 7", "7") == 0.25


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("The answer is B.", "B"),
        ("The answer is (B)", "B"),
        ("Answer: C", "C"),
        ("**Answer:** C", "C"),
        ("Answer: **C**", "C"),
        ("Answer: option D", "D"),
        ("answer A? No, the answer is E", "E"),
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"\boxed{B. 12 km}", "B"),
        (r"\boxed{A, B}", None),
        (r"\boxed{12}", None),
        (r"The answer is A. \boxed{B}", "B"),
        ("because of that\nD", "D"),
        ("because of that\n(D).", "D"),
        ("A good question", None),
        ("The answer is A's", None),
        ("The answer is Apple", None),
        ("the answer is a", None),
        ("A\nand more", None),
        ("", None),
    ],
)
def test_multiple_choice(text, choice):
    assert multiple_choice.extract_choice(text) == choice
    result = default_compute_score("multiple_choice", text, "B")
    assert result == {"score": float(choice == "B"), "acc": choice == "B", "pred": choice or ""}


def test_multiple_choice_truth():
    assert multiple_choice.compute_score("Answer: B", "(B)")["score"] == 1.0
    with pytest.raises(RewardError, match=r"ground truth 1 is no letter"):
        multiple_choice.compute_score("Answer: B", 1)
