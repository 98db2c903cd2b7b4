"""Reward rule of DAPO's mathematics: compares the text after the last "Answer:" with the reference answer."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from scalerl.rewards.errors import RewardError
from scalerl.rewards.math_answer import last_boxed

# An answer must be this near to the end, since text before is reasoning; a box without "Answer:" even nearer.
TAIL_CHARS, BOX_TAIL_CHARS = 300, 100
_ANSWER = re.compile(r"answer[\s*_]*:\s*([^\n]+)", re.IGNORECASE)
_INLINE_MATH = re.compile(r"\$\$?(.+?)\$")
# Units and counted things, from Minerva (arXiv 2206.14858), appendix D.1; removed wherever they are.
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
# A backslash at the end was a space of LaTeX.
_DROPPED = re.compile(r"\\left|\\right|\\[!,;: ]|\\$|\\l?dots|\$|\\%|%|\"|\s")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)")


def extract_answer(solution_str: str) -> str | None:
    """The answer of a response; None if there is none.

    It is the rest of the line after the last "Answer:" in the last TAIL_CHARS characters, else the content of the last
    \\boxed{} in the last BOX_TAIL_CHARS. "Answer" may have any case, and the answer may begin on a later line than the
    colon. Markdown signs around it do not count.
    """
    answers = _ANSWER.findall(solution_str[-TAIL_CHARS:])
    return answers[-1].strip("*_ \t") if answers else last_boxed(solution_str[-BOX_TAIL_CHARS:])


def normalized(answer: str) -> str:
    """Normalizes an answer, so that its different spellings give the same text.

    A box is replaced by its content, an equation by the part after the last "=", inline math by the part between the
    first two $. Units, articles, %, degrees, spaces and a final stop are removed; \\dfrac and \\tfrac become \\frac,
    with braces; a number loses commas and takes its shortest form (3.0 is 3). A text command is replaced by its
    content, or removed after a number (a unit).
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
    """Scores a response by its answer.

    Returns score: 1.0 for the right answer, else -1.0 (no answer counts as wrong); acc: True if it is right; pred: the
    normalized answer, "" without one.
    Right means the same text after `normalized`; there is no algebra, as the answers of DAPO-Math-17k are integers.
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
