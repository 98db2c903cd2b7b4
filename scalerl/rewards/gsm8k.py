"""Reward rule of GSM8K: the final number of the response equals the reference answer."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

# Commas count only between groups of three digits: "3,4" is two numbers.
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_MARKED_ANSWER = re.compile(rf"####\s*(-?\$?{_DIGITS})")
# A sign counts only if no digit or letter is before it: "10-3" holds 10 and 3.
_ANY_NUMBER = re.compile(rf"(?:(?<!\w)-)?\$?{_DIGITS}")


def extract_answer(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """The final number of a response: after the last "####" (strict), or the last one anywhere (flexible).

    It is returned without "$" and ","; None if there is none. Raises ValueError for another method.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"gsm8k: method={method!r}: use strict or flexible")
    numbers = (_MARKED_ANSWER if method == "strict" else _ANY_NUMBER).findall(solution_str)
    return numbers[-1].replace(",", "").replace("$", "") if numbers else None


def compute_score(
    solution_str: str,
    ground_truth: str | int | float,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Scores a response: `score` for the right number (1,000 = 1000.0), `format_score` for another, 0 for none.

    Raises ValueError when ground_truth holds no number. A reference solution ending in "#### 72" counts as 72.
    """
    reference = extract_answer(str(ground_truth), "strict") or extract_answer(str(ground_truth), "flexible")
    if reference is None:
        raise ValueError(f"gsm8k: ground truth {ground_truth!r} holds no number; correct reward_model.ground_truth")
    answer = extract_answer(solution_str, method)
    if answer is None:
        return 0.0
    return score if Decimal(answer) == Decimal(reference) else format_score
