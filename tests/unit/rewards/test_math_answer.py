from __future__ import annotations

import asyncio

import pytest

from scalerl.config.schema import CustomRewardFunctionConfig, RewardModelConfig
from scalerl.rewards import RewardError, ScoreRequest, build_reward_manager, default_compute_score, math_answer
from scalerl.rewards.function_processes import ProcessPool

# 9^(9^(9^9)) has no size at all: sympy counts for ever, in one call that never gives the GIL back.
HANGS = "9^{9^{9^{9}}}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"\fbox{8}", "8"),
        (r"\boxed{9} and \boxed{unclosed", "9"),
        (r"\boxed{unclosed", None),
        (r"\boxed 5", "5"),
        (r"so $\boxed 42$.", "42"),
        (r"so \boxed 42.", "42"),
        (r"so \boxed 42, as above", "42"),
        (r"so \(\boxed -3 + x\)", "-3 + x"),
        (r"\fbox 8", "8"),
        (r"\boxed{1}, no: \boxed 2", "2"),
        (r"\boxed 1, no: \boxed{2}", "2"),
        (r"\boxed{7} is the \boxed answer", "7"),
        (r"put it in \boxed form", None),
        (r"\boxed5", None),
        ("\\boxed", None),
        ("\\boxed $", None),
        (r"\boxed{}", ""),
        ("5", None),
        ("\\boxed{" * 2000, None),
    ],
)
def test_last_boxed(text, expected):
    assert math_answer.last_boxed(text) == expected


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("0.5", r"\frac{1}{2}", True),
        (r"\dfrac12", r"\frac{1}{2}", True),
        (r"\frac{2}{4}", r"\frac12", True),
        (r"\frac{1}{3}", r"\frac{1}{2}", False),
        ("0.333333", r"\frac{1}{3}", True),
        ("0.33", r"\frac{1}{3}", False),
        (r"10\text{ cm}", "10", True),
        (r"\$1{,}234", "1234", True),
        (r"50\%", "50", True),
        ("50", r"50\%", True),
        (r"5\%", "50", False),
        (r"\{3, 1, 2\}", r"\{1, 2, 3\}", True),
        (r"\{1, 2\}", r"\{1, 2, 3\}", False),
        ("(1, 2)", "(2, 1)", False),
        ("(1,2]", "(1, 2]", True),
        ("[1,2]", "(1, 2]", False),
        (r"(x+1)^2", "x^2+2x+1", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("-5", "5", False),
        (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", False),
        (r"\text{(B)}", r"\text{B}", True),
        (r"\text{(C)}", r"\text{B}", False),
        (r"\frac{1}{}", "1", False),
        (r"\left( 1", "1", False),
        ("^^__{{}}", "1", False),
        ("9" * 900, "9" * 899, False),
        ("10^{100}", "10^{100}+1", False),
        ("1" * 5000, "1", False),
        ("import os", "1", False),
        (r"\infty", "1", False),
        (r"\frac{1}{0}", "1", False),
        ("", "1", False),
    ],
)
def test_equality(answer, truth, expected):
    result = default_compute_score("HuggingFaceH4/MATH-500", rf"it is \boxed{{{answer}}}", truth)
    assert (result["score"], result["acc"], result["pred"]) == (float(expected), expected, answer)


def test_the_answer_without_a_box_scores_zero_and_the_box_of_a_solution_is_the_truth():
    assert math_answer.compute_score("it is 42", "42") == {"score": 0.0, "acc": False, "pred": ""}
    assert math_answer.compute_score(r"\boxed{42}", r"We see that \boxed{42}.")["score"] == 1.0


def test_a_box_without_braces_is_one_in_answer_and_truth():
    assert math_answer.compute_score(r"so $\boxed 42$", "42") == {"score": 1.0, "acc": True, "pred": "42"}
    assert math_answer.compute_score(r"\boxed{42}", r"We see that $\boxed 42$.")["score"] == 1.0
    assert math_answer.compute_score(r"so \boxed 41", "42")["score"] == 0.0


@pytest.mark.parametrize("truth", ["", "  ", r"\boxed{}"])
def test_bad_truth(truth):
    if truth.strip() == "":
        with pytest.raises(RewardError, match="ground truth is empty"):
            math_answer.compute_score(r"\boxed{1}", truth)
    else:
        with pytest.raises(RewardError):
            math_answer.compute_score(r"\boxed{1}", truth)


def test_hostile_answer_is_ended_counted_and_costs_the_next_one_nothing(monkeypatch):
    monkeypatch.setattr(math_answer, "TIMEOUT_S", 2.0)
    call = ProcessPool.call

    def limited(pool, timeout_s, arguments):
        """A good answer has the time that a loaded machine takes."""
        return call(pool, timeout_s if arguments["answer"] == HANGS else 60.0, arguments)

    monkeypatch.setattr(ProcessPool, "call", limited)

    def manager(**config):
        return build_reward_manager(RewardModelConfig(timeout_s=120.0, **config), CustomRewardFunctionConfig())

    def request(answer):
        return ScoreRequest("prompt 3 sample 1", "lighteval/MATH", "p", rf"\boxed{{{answer}}}", "6")

    async def scores(rewards):
        return await asyncio.gather(*(rewards.score(request(answer)) for answer in (HANGS, r"\frac{12}{2}", HANGS)))

    hung, good, again = asyncio.run(scores(manager(on_error="zero")))
    assert hung.score == 0.0 and "not compared in 2 s" in hung.error and again.error
    assert good.score == 1.0 and good.error is None
    with pytest.raises(RewardError, match=r"(?s)prompt 3 sample 1.*not compared in 2 s"):
        asyncio.run(manager().score(request(HANGS)))
