"""Reward rule of GSM8K: the final number of the response equals the reference answer."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, Literal

from scalerl.rewards.answer_text import begins_with_number, number_in

_MARKED_LINE = re.compile(r"####[ \t#]*\n?([^\n]*)")
# A sign counts only if no digit or letter is before it: "10-3" holds 10 and 3.
_ANY_NUMBER = re.compile(r"(?:(?<!\w)-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def extract_answer(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> Decimal | None:
    """The final number of a response: of the last line "#### number" (strict), or the last one anywhere (flexible).

    None if there is none. The number may be on the line after its marker; headings, which do not begin with a number,
    do not count. Raises ValueError for another method.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"gsm8k: method={method!r}: use strict or flexible")
    if method == "strict":
        lines = [line for line in _MARKED_LINE.findall(solution_str) if begins_with_number(line)]
        return number_in(lines[-1]) if lines else None
    numbers = _ANY_NUMBER.findall(solution_str)
    return Decimal(numbers[-1].replace(",", "").replace("$", "")) if numbers else None


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Scores a response: `score` for the right number (1,000 = 1000.0), `format_score` for another, 0 for none.

    ground_truth: a number as `number_in` reads it, or a reference solution that ends in "#### 72".
    Raises ValueError for anything else.
    """
    text = str(ground_truth)
    reference = extract_answer(text) if "####" in text else number_in(text)
    if reference is None:
        raise ValueError(f"gsm8k: ground truth {ground_truth!r} holds no number; correct reward_model.ground_truth")
    answer = extract_answer(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == reference else format_score
