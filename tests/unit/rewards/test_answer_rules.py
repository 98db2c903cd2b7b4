from __future__ import annotations

import pytest

from scalerl.rewards import RewardError, default_compute_score, math_dapo, multiple_choice, register_reward


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("steps\nAnswer: 42", "42", True),
        ("Answer: 41\nno:\nAnswer: 42", "42", True),
        ("Answer: 42\nno:\nAnswer: 41", "42", False),
        ("**Answer:** 42", "42", True),
        ("**Answer: 42**", "42", True),
        ("answer: $42$.", "42", True),
        (r"Answer: \boxed{42}", "42", True),
        (r"Answer: $\boxed{42}$", 42, True),
        ("Answer: 1,234", "1234", True),
        (r"Answer: 1{,}234{,}567", "1234567", True),
        ("Answer: 42.0", "42", True),
        ("Answer: 042", "42", True),
        ("Answer: +42", "42", True),
        ("Answer: -42", "42", False),
        ("Answer: -0", "0", True),
        (r"Answer: 42\text{ cm}", "42", True),
        (r"Answer: 42^\circ", "42", True),
        (r"Answer: 42\%", "42", True),
        (r"Answer: \dfrac12", r"\frac{1}{2}", True),
        ("Answer: 12,34", "1234", False),
        ("Answer: 421", "42", False),
        ("Answer: 42 or 43", "42", False),
        ("My answer: 42", "42", False),
        ("42", "42", False),
        ("Answer:", "42", False),
        ("Answer: 42" + "x" * 300, "42", False),
        ("Answer: " + "9" * 290, "9", False),
    ],
)
def test_dapo(text, truth, expected):
    result = default_compute_score("math_dapo", text, truth)
    assert (result["score"], result["acc"]) == ((1.0, True) if expected else (-1.0, False))


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
