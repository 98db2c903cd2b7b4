"""Reward rule of DAPO's mathematics: the last line "Answer: ..." holds the reference answer."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from scalerl.rewards.errors import RewardError
from scalerl.rewards.math_answer import last_boxed

# An answer stands at the end: what is further from it is reasoning.
TAIL_CHARS = 300
_ANSWER_LINE = re.compile(r"^[ \t*#>_]*answer[ \t*_]*:(.*)$", re.IGNORECASE | re.MULTILINE)
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]frac")
_SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)(?!\d)")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,|\\!)(?=\d{3}(?!\d))")
_DEGREES = re.compile(r"\^\{?\\circ\}?|°")
_DROPPED = re.compile(r"\\left|\\right|\\[!,;: ]|\\\$|\$|\\%|%|\s")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)")


def extract_answer(solution_str: str) -> str | None:
    """What follows the colon of the last line "Answer: ..." in the last TAIL_CHARS characters; None without one.

    Markdown signs around the word count for nothing; of a box, what it holds.
    """
    found = _ANSWER_LINE.findall(solution_str[-TAIL_CHARS:])
    if not found:
        return None
    line = found[-1].strip().strip("*_ ")
    boxed = last_boxed(line)
    return line if boxed is None else boxed


def normalized(answer: str) -> str:
    """Without $, %, degrees, spaces, commas of thousands, a stop at the end; \\frac for its kinds; a number in its
    shortest form (3.0 is 3). A text command leaves what it holds, or nothing if it follows a number (a unit)."""
    text = re.sub(r"(?<=[\d}])\s*\\(?:text|mathrm|mbox)\{[^{}]*\}", "", answer.strip())
    text = _TEXT.sub(r"\1", text)
    text = _DEGREES.sub("", text)
    text = _THOUSANDS.sub("", text)
    text = _DROPPED.sub("", text).rstrip(".")
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", _FRACTION.sub(r"\\frac", text))
    if _NUMBER.fullmatch(text) and len(text) <= TAIL_CHARS:
        sign, number = ("-" if text[0] == "-" else ""), text.lstrip("+-")
        whole, _, part = number.partition(".")
        whole, part = whole.lstrip("0") or "0", part.rstrip("0")
        text = whole + (f".{part}" if part else "")
        text = text if Decimal(text) == 0 else sign + text
    return text


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """score 1.0 if the answer is ground_truth, else -1.0 (no "Answer:" line counts as wrong).

    acc: whether it is right. pred: the normalized answer, "" without one.
    Right: the same text after `normalized`. No algebra: the answers of DAPO-Math-17k are integers.
    Source: Yu et al. 2025, DAPO, arXiv:2503.14476, section 2.4 (rule-based reward, 1 and -1).

    Raises RewardError when ground_truth is empty.
    """
    reference = normalized(str(ground_truth))
    if not reference:
        raise RewardError("math_dapo: the ground truth is empty; correct reward_model.ground_truth of the row")
    answer = extract_answer(solution_str)
    pred = "" if answer is None else normalized(answer)
    correct = pred == reference
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}
