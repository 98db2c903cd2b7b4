"""Reward rule of DAPO's mathematics: what follows the last "Answer:" is the reference answer."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from scalerl.rewards.errors import RewardError
from scalerl.rewards.math_answer import last_boxed

# An answer stands at the end: what is further from it is reasoning. A box without "Answer:" must stand nearer yet.
TAIL_CHARS, BOX_TAIL_CHARS = 300, 100
_ANSWER = re.compile(r"answer[\s*_]*:\s*([^\n]+)", re.IGNORECASE)
_INLINE_MATH = re.compile(r"\$\$?(.+?)\$")
# Words that say of what a number is; from Minerva (arXiv 2206.14858), appendix D.1. Taken out wherever they stand.
_UNITS = re.compile(
    "childrentickets|students|multiples|integers|dollars|minutes|degrees|squares?|inches|points|pounds|meters|digits|"
    "edges|meals|hours|units|cents|feet|ways|mph|sue|km|cm|gm"
)
_ARTICLE = re.compile(r"\b(?:an?)\s")
_UNIT_TEXT = re.compile(r"(?<=[\d}])\s*\\(?:text|mathrm|mbox)\{[^{}]*\}(?:\^\{?[23]\}?)?")
_AND = re.compile(r",?\s*\\(?:text|mbox)\{\s*and\s*\}")
_NO_TEXT = re.compile(r"\\(?:text|mbox)\{\s*\}(?:\^\{?[23]\}?)?")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|overline)\{((?:[^{}]|\{[^{}]*\})*)\}")
_FRACTION = re.compile(r"\\[dt]frac")
_SHORT_FRACTION = re.compile(r"\\frac([^{\s])(.)")
_SHORT_ROOT = re.compile(r"\\sqrt([^{\s\[])")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!|,\\!)(?=\d{3}(?!\d))")
_DEGREES = re.compile(r"\^\{?\\circ\}?|°")
_DROPPED = re.compile(r"\\left|\\right|\\[!,;: ]|\\l?dots|\$|\\%|%|\"|\s")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)")


def extract_answer(solution_str: str) -> str | None:
    """The rest of the line after the last "Answer:", wherever it stands, in the last TAIL_CHARS characters; without one
    what the last \\boxed{} in the last BOX_TAIL_CHARS holds; None without either.

    "Answer" in any case; an answer may begin on a later line than the colon. Markdown signs around it do not count.
    """
    found = _ANSWER.findall(solution_str[-TAIL_CHARS:])
    return found[-1].strip("*_ \t") if found else last_boxed(solution_str[-BOX_TAIL_CHARS:])


def normalized(answer: str) -> str:
    """The answer as one text for all its spellings.

    Of a box what it holds; of an equation what follows the last "="; of inline math what is between the first two $.
    Without units, articles, %, degrees, spaces, a stop at the end; \\frac for its kinds, with braces; a number without
    commas and in its shortest form (3.0 is 3). A text command leaves what it holds, or nothing after a number (a unit).
    """
    boxed = last_boxed(answer)
    text = (answer if boxed is None else boxed).split("=")[-1].strip().replace(r"\$", "")
    math = _INLINE_MATH.search(text)
    text = _AND.sub(",", _ARTICLE.sub("", text if math is None else math[1]))
    text = _NO_TEXT.sub("", _UNITS.sub("", _DEGREES.sub("", _UNIT_TEXT.sub("", text))))
    while (bare := _TEXT.sub(r"\1", text)) != text:
        text = bare
    text = _DROPPED.sub("", _THOUSANDS.sub("", text)).rstrip(".").strip("*_")
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", _FRACTION.sub(r"\\frac", text))
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    if (digits := text.replace(",", "")).isdecimal():
        text = digits
    return _shortest(text) if _NUMBER.fullmatch(text) and len(text) <= TAIL_CHARS else text


def _shortest(number: str) -> str:
    sign, digits = ("-" if number[0] == "-" else ""), number.lstrip("+-")
    whole, _, part = digits.partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    text = whole + (f".{part}" if part else "")
    return text if Decimal(text) == 0 else sign + text


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """score 1.0 if the answer is ground_truth, else -1.0 (no answer counts as wrong).

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
