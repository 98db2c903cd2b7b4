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
        # The table has what a response may write; these have no verdict.
        (r"\boxed{9} and \boxed{unclosed", "9"),
        (r"\boxed{unclosed", None),
        (r"put it in \boxed form", None),
        ("\\boxed", None),
        (r"\boxed{}", ""),
        ("\\boxed{" * 2000, None),
    ],
)
def test_last_boxed(text, expected):
    assert math_answer.last_boxed(text) == expected


def test_the_answer_without_a_box_scores_zero_and_the_box_of_a_solution_is_the_truth():
    wrong = default_compute_score("HuggingFaceH4/MATH-500", "it is 42", "42")
    assert wrong == {"score": 0.0, "acc": False, "pred": ""}
    assert math_answer.compute_score(r"\boxed{42}", r"We see that \boxed{42}.")["score"] == 1.0


def test_a_box_without_braces_is_one_in_answer_and_truth():
    assert math_answer.compute_score(r"so $\boxed 42$", "42") == {"score": 1.0, "acc": True, "pred": "42"}
    assert math_answer.compute_score(r"\boxed{42}", r"We see that $\boxed 42$.")["score"] == 1.0
    assert math_answer.compute_score(r"so \boxed 41", "42")["score"] == 0.0


@pytest.mark.parametrize(("truth", "message"), [("", "is empty"), ("  ", "is empty"), (r"\boxed{}", None)])
def test_bad_truth(truth, message):
    with pytest.raises(RewardError, match=message):
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
