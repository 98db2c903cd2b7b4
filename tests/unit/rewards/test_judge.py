"""The judge's question, and the number in its answer."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from scalerl.config.schema import JudgeConfig
from scalerl.rewards import RewardError, ScoreRequest
from scalerl.rewards.judge import describe_failure, fill, load_question, read_number

SAMPLE = ScoreRequest("train prompt 3 sample 1", "essays", "Name a prime.", "It is {ground_truth} or {prompt}.", "7")


def test_the_sample_takes_the_places_and_its_own_braces_stay() -> None:
    question = 'Q {prompt} A {response} T {ground_truth} B {response} {"score": 1} {other}'
    assert fill(question, SAMPLE) == (
        "Q Name a prime. A It is {ground_truth} or {prompt}. T 7 B It is {ground_truth} or {prompt}. "
        '{"score": 1} {other}'
    )
    assert fill("<{ground_truth}>{response}", replace(SAMPLE, ground_truth=None, solution_str="\\1")) == "<>\\1"


def test_scalerls_own_question_has_every_place_and_nothing_that_would_count_as_a_number() -> None:
    text = fill(load_question(None), SAMPLE)
    assert all(part in text for part in (SAMPLE.prompt_str, SAMPLE.solution_str, "\n7\n"))
    # A judge that begins by repeating its question has not judged yet.
    assert re.search(JudgeConfig().pattern, text) is None


def test_a_question_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "q.txt"
    path.write_text("Wie gut ist {response}? \u00fc", encoding="utf-8")
    assert load_question(str(path)) == "Wie gut ist {response}? \u00fc"
    path.write_text("How good is {reponse}?")
    with pytest.raises(RewardError, match=r"q.txt: does not hold \{response\}"):
        load_question(str(path))
    with pytest.raises(RewardError, match=r"prompt_path = .*missing.txt: cannot be read"):
        load_question(str(tmp_path / "missing.txt"))
    path.write_bytes(b"\xff{response}")
    with pytest.raises(RewardError, match="give a text file in UTF-8"):
        load_question(str(path))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Good. Score: 7", 7.0),
        ("Score: 7 was my first thought.\nScore:  2.5\n", 2.5),
        ("Score: 10.", 10.0),
        ("Score: 0 of 10", 0.0),
    ],
)
def test_the_last_match_counts(text: str, number: float) -> None:
    assert read_number(text, JudgeConfig(), is_cut=False) == number


@pytest.mark.parametrize(
    ("text", "config", "is_cut", "message"),
    [
        ("Seven.", {}, False, r"nothing in the judge's text matches reward_model.judge.pattern 'Score:.*'$"),
        ("", {}, False, "nothing in the judge's text matches"),
        ("Let me think", {}, True, "it ended at reward_model.judge.max_response_length=1024"),
        # 1 may be the beginning of 10.
        ("Score: 1", {}, True, "cut off in its number '1'"),
        ("Score: 11", {}, False, "has '11', not a number from 0 to 10"),
        ("Score: -1", {}, False, "has '-1', not a number from 0 to 10"),
        ("Grade: B", {"pattern": "Grade: (.)"}, False, "has 'B', not a number"),
        ("Grade: nan", {"pattern": "Grade: (.+)"}, False, "has 'nan', not a number"),
        ("Grade", {"pattern": "Grade(: .)?"}, False, "has None, not a number"),
    ],
)
def test_a_text_without_a_number_has_failed(text: str, config: dict, is_cut: bool, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        read_number(text, JudgeConfig(**config), is_cut=is_cut)


def test_a_text_that_is_cut_behind_its_number_counts() -> None:
    assert read_number("Score: 1, since", JudgeConfig(), is_cut=True) == 1.0


def test_a_failure_shows_the_sample_and_the_end_of_the_judges_text() -> None:
    shown = describe_failure(SAMPLE, "no number", "x" * 600 + " the end")
    assert "sample train prompt 3 sample 1" in shown and "cause: no number" in shown
    assert "response: 'It is {ground_truth} or {prompt}.'" in shown and "ground_truth: '7'" in shown
    assert "judge's text (last 500 of 608 characters): 'xx" in shown and " the end'" in shown
    assert "reward_model.on_error=zero" in shown
    long = describe_failure(replace(SAMPLE, solution_str="y" * 501), "no number", None)
    assert "response (first 500 of 501 characters)" in long and "judge's text" not in long
