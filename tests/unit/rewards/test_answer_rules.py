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
        ("Answer: 421", "42", False),
        ("Answer: 42 or 43", "42", False),
        ("42", "42", False),
        ("Answer:", "42", False),
        ("Answer: 42" + "x" * 300, "42", False),
        ("Answer: " + "9" * 290, "9", False),
    ],
)
def test_dapo(text, truth, expected):
    result = default_compute_score("math_dapo", text, truth)
    assert (result["score"], result["acc"]) == ((1.0, True) if expected else (-1.0, False))


# What verl's rule scores, which ours repeats: the last "Answer:" in the last 300 characters, in any case and anywhere
# on its line; its answer begins behind the colon, on a later line too. Of an equation the right side, of inline math
# the first formula; units, articles, spaces and quotes dropped, commas between digits too, short fractions and roots
# with braces. A box without "Answer:" is no answer.
VERL = [
    ("Final Answer: 42", "42", True),
    ("So my final answer: 42", "42", True),
    ("FINAL ANSWER : 42", "42", True),
    ("Answer:\n42", "42", True),
    ("Answer:\n\n  42\nThat is all.", "42", True),
    ("the answer: 41. No.\nFinal Answer: 42", "42", True),
    ("Final Answer: 42\nor rather the answer: 41", "42", False),
    ("Answer: 42\nAnswer:", "42", True),
    ("The answer is 42", "42", False),
    ("Answer = 42", "42", False),
    ("Final Answer: x = 42", "42", True),
    ("Final Answer: $x + y = 42$", "42", True),
    ("Answer: 42 = 6 * 7", "42", False),
    ("Answer: the number of ways is $42$ in all", "42", True),
    ("Answer: $41$ or $42$", "42", False),
    ("Answer: 42 square units", "42", True),
    ("Answer: 42 km", "42", True),
    ("Answer: 42 minutes", "42", True),
    (r"Answer: 42 \text{ cm}^2", "42", True),
    (r"Answer: 42^{\circ}", "42", True),
    (r"Answer: \$42", "42", True),
    ('Answer: "42"', "42", True),
    ("Answer: 42 apples", "42", False),
    ("Answer: 1,234,567", "1234567", True),
    ("Answer: 12,34", "1234", True),
    ("Answer: 1, 2", "1,2", True),
    (r"Answer: 1,\text{and}2", "1,2", True),
    (r"Answer: \frac12", r"\frac{1}{2}", True),
    (r"Answer: 2\sqrt3", r"2\sqrt{3}", True),
    (r"Answer: \text{(B)}", "(B)", True),
    (r"Answer: \textbf{42}", "42", True),
    (r"Answer: \overline{42}", "42", True),
    (r"Answer: $\boxed{42}$", "42", True),
    ("Answer: 42\\ ", "42", True),
    ("Answer: 42 \\ \n", "42", True),
    (r"it is \boxed{41}", "42", False),
    (r"\boxed{42}" + "." * 100, "42", False),
    (r"Answer: 41, that is \boxed{42}!", "41", False),
    ("Answer: 42" + "." * 300, "42", False),
    ("", "42", False),
]
# Where ours is meant to differ: answers in another form, and without "Answer:" the last box of the last 100 characters
# (verl's rule looks at boxes only with strict_box_verify).
MORE = [
    (r"it is \boxed{42}", "42"),
    (r"\boxed{41}, no: \boxed{42}.", "42"),
    ("**Answer**: 42", "42"),
    ("**Final Answer:** 42", "42"),
    ("Final Answer: 42.", "42"),
    ("Final Answer: 42.0", "42"),
    ("Final Answer: +042", "42"),
    (r"Final Answer: 42\%", "42"),
    ("Final Answer: $$42$$", "42"),
    (r"Final Answer: 42 \text{apples}", "42"),
    (r"Final Answer: it is \boxed{42}", "42"),
    (r"Final Answer: \boxed{x = 42}", "42"),
    (r"Final Answer: \tfrac12", r"\dfrac{1}{2}"),
]


# What verl's rule drops that ours leaves: letters of a word, commas and units of no number.
LESS = [
    ("Answer: 1,234a ", "1234"),
    ("Answer: B{,}", "B"),
    (r"Answer: B,\!", "B"),
    (r"Answer: \mbox{m}42", "42"),
    (r"Answer: B\mathrm{th}", "B"),
]


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [*VERL, *((*case, True) for case in MORE), *((*case, False) for case in LESS)],
)
@pytest.mark.parametrize("data_source", ["math_dapo", "aime2024"])
def test_the_last_answer_anywhere(data_source, text, truth, expected):
    result = default_compute_score(data_source, text, truth)
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
