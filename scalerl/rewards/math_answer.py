"""Reward rule of MATH: compares the content of the response's last \\boxed{} with the reference, as mathematics."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

from scalerl.rewards.errors import RewardError
from scalerl.rewards.function_processes import CallFailed, CallTimeout, ProcessPool

# Must be below reward_model.timeout_s, or the deadline of the sample passes first.
TIMEOUT_S = 10.0
# The longest answer of MATH has 159 characters; longer ones would take the parser too much time.
MAX_ANSWER_CHARS = 1000
MEMORY_BYTES = 2 * 1024**3
# "42$", "3 + x\\)", "42 and so on".
_BARE = re.compile(r"(?![A-Za-z]{2})(?:(?P<formula>[^$\n]+?)(?:\$|\\\)|\\\])|(?P<word>[^\s$]+))")


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} or \\fbox{...} with balanced braces, or the text after one without.

    Without braces: the text up to the end of the formula if one ends on the line, else one word. It must not begin with
    two letters, which would be prose about a box.  None if there is no box.
    """
    for command in sorted(_ends_of(text, "\\boxed") + _ends_of(text, "\\fbox"), reverse=True):
        start = command
        while text[start : start + 1].isspace():
            start += 1
        if text[start : start + 1] == "{":
            if (end := _closing_brace(text, start)) is not None:
                return text[start + 1 : end].strip()
        elif start > command and (bare := _BARE.match(text, start)):
            return (bare["formula"] or bare["word"]).strip().rstrip(".,")
    return None


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Scores a response by its last box.

    Returns score: 1.0 if the box equals ground_truth, else 0.0 (no box, another answer, unreadable LaTeX); acc: the
    same as a bool; pred: the content of the box, "" without one.
    ground_truth: an answer in LaTeX, or a solution whose last box holds it (as in the files of MATH).
    Equal: the same text, or equal by math-verify 0.9.0 (sets, intervals, fractions, decimals to 6 digits, units
    and a percent sign at the end dropped).
    Source: Hendrycks et al. 2021, arXiv:2103.03874 (boxed answers); https://github.com/huggingface/Math-Verify

    Raises RewardError after TIMEOUT_S or over MEMORY_BYTES; reward_model.on_error decides then.
    """
    reference = str(ground_truth).strip()
    reference = last_boxed(reference) or reference
    if not reference:
        raise RewardError("math: the ground truth is empty; correct reward_model.ground_truth of the row")
    answer = last_boxed(solution_str)
    correct = bool(answer) and is_equal(answer, reference)
    return {"score": float(correct), "acc": correct, "pred": answer or ""}


def is_equal(answer: str, reference: str) -> bool:
    """True if two answers, in LaTeX without $, are equal as mathematics.  Raises RewardError as compute_score."""
    answer, reference = (text.removesuffix("%").removesuffix("\\").rstrip() for text in (answer, reference))
    if answer == reference:
        return True
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    try:
        return _pool().call(TIMEOUT_S, {"answer": answer, "reference": reference})
    except CallTimeout:
        cause = f"not compared in {TIMEOUT_S:g} s"
    except CallFailed as failed:
        cause = str(failed)
    raise RewardError(f"math: {answer!r:.200} against {reference!r:.200}: {cause}")


@functools.cache
def _pool() -> ProcessPool:
    return ProcessPool("scalerl.rewards.math_equality:verify_latex", min(8, os.cpu_count() or 1), MEMORY_BYTES)


def _ends_of(text: str, command: str) -> list[int]:
    ends, start = [], text.find(command)
    while start >= 0:
        ends.append(start + len(command))
        start = text.find(command, ends[-1])
    return ends


def _closing_brace(text: str, start: int) -> int | None:
    depth, position = 0, start
    while position < len(text):
        if text[position] == "\\":
            position += 1  # \{ and \} are characters of the answer
        elif text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None
