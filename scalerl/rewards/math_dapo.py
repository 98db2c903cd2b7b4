"""Reward rule of DAPO's mathematics: compares the text after the last "Answer:" with the reference answer."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from scalerl.rewards.answer_text import in_ascii, number_in
from scalerl.rewards.errors import RewardError
from scalerl.rewards.math_answer import last_boxed

# An answer must be this near to the end, since text before is reasoning.
TAIL_CHARS = 300
# Behind "Answer:", on this line or a later one, may be marks of Markdown and the start of a formula.
_ANSWER = re.compile(r"answer[\s*_]*[:：][\s*_`]*(?:(?:\$\$|\\\[)[ \t]*\n\s*)?(?=([^\n]*))", re.IGNORECASE)
_MARKUP_END = re.compile(r"(?:<[/|][^<>]*>|[*_`\s])+$")
_INLINE_MATH = re.compile(r"\$\$?([^$]+)\$")
# "x = 3, y = 4" has more than one right side.
_ASSIGNMENTS = re.compile(r"\d\s*(?:,|and|or)\s*\$?\w+\s*=")
# Units and counted things, from Minerva (arXiv 2206.14858), appendix D.1; removed wherever they are.
_UNITS = re.compile(
    "childrentickets|students|multiples|integers|dollars|minutes|degrees|squares?|inches|points|pounds|meters|digits|"
    "edges|meals|hours|units|cents|feet|ways|mph|sue|km|cm|gm"
)
_ARTICLE = re.compile(r"\b(?:an?)\s")
_UNIT_TEXT = re.compile(r"(?<=[\d}])\s*\\(?:text|mathrm|mbox)\{[^{}]*\}(?:\^\{?[23]\}?)?")
_AND = re.compile(r",?\s*(?:\\(?:text|mbox)\{\s*and\s*\}|\band\b)")
_NO_TEXT = re.compile(r"\\(?:text|mbox)\{\s*\}(?:\^\{?[23]\}?)?")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|overline)\{((?:[^{}]|\{[^{}]*\})*)\}")
_FRACTION = re.compile(r"\\[dt]frac")
_SHORT_FRACTION = re.compile(r"\\frac([^{\s])(.)")
_SHORT_ROOT = re.compile(r"\\sqrt([^{\s\[])")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!|,\\!)(?=\d{3}(?!\d))")
_SCRIPT = re.compile(r"([_^])(\d+|[a-z])")
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_LETTER = re.compile(r"\(([A-Z])\)")
_DEGREES = re.compile(r"\^\{?\\circ\}?")
# A backslash at the end was a space of LaTeX.
_DROPPED = re.compile(r"\\left|\\right|\\[!,;: ]|\\$|\\l?dots|\$|\\%|%|\"|(?<!\d)\s|\s(?!\d)")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)")


def extract_answer(solution_str: str) -> str | None:
    """The answer of a response, in its last TAIL_CHARS characters; None if there is none.

    It is the rest of the line after the last "Answer:", else the content of the last \\boxed{}. "Answer" may have any
    case, and the answer may begin on a later line than the colon. Markdown signs around it do not count.
    """
    tail = solution_str[-TAIL_CHARS:]
    answers = [answer for line in _ANSWER.findall(tail) if (answer := _MARKUP_END.sub("", line))]
    return answers[-1] if answers else last_boxed(tail)


def normalized(answer: str) -> str:
    """Normalizes an answer, so that its different spellings give the same text.

    A box is replaced by its content, an equation by the part after the last "=", text around one formula by the
    formula. Units, articles, %, degrees, spaces and a final stop are removed; \\dfrac and \\tfrac become \\frac, with
    braces; a number loses the commas of its thousands and takes its shortest form (3.0 is 3). A text command is
    replaced by its content, or removed after a number (a unit). A word is in small letters.
    """
    text = in_ascii(_without_box(answer))
    text = text if _ASSIGNMENTS.search(text) else text.split("=")[-1]
    text = text.strip().replace(r"\$", "")
    formulas = _INLINE_MATH.findall(text)
    text = _AND.sub(",", _ARTICLE.sub("", formulas[0] if len(formulas) == 1 else text))
    text = _NO_TEXT.sub("", _UNITS.sub("", _DEGREES.sub("", _UNIT_TEXT.sub("", text))))
    while (bare := _TEXT.sub(r"\1", text)) != text:
        text = bare
    text = _DROPPED.sub("", _THOUSANDS.sub("", text)).rstrip(".").strip("*_")
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", _FRACTION.sub(r"\\frac", text))
    text = _SCRIPT.sub(r"\1{\2}", _SHORT_ROOT.sub(r"\\sqrt{\1}", text))
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    if _NUMBER.fullmatch(text) and len(text) <= TAIL_CHARS:
        return _shortest(text)
    if letter := _LETTER.fullmatch(text):
        return letter[1]
    return text.lower() if text.isalpha() and not text.isupper() else text


def _without_box(answer: str) -> str:
    """The content of an answer's box; all of the answer if it has none, or another number before it."""
    boxed = last_boxed(answer)
    before = answer[: max(answer.rfind(r"\boxed"), answer.rfind(r"\fbox"), 0)]
    return answer if boxed is None or ("=" not in before and re.search(r"\d", before)) else boxed


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
    Right means the same text after `normalized`, or the same number (`number_in`); there is no algebra, as the answers
    of DAPO-Math-17k are integers.
    Source: Yu et al. 2025, DAPO, arXiv:2503.14476, section 2.4 (rule-based reward, 1 and -1).

    Raises RewardError when ground_truth is empty.
    """
    reference = normalized(str(ground_truth))
    if not reference:
        raise RewardError("math_dapo: the ground truth is empty; correct reward_model.ground_truth of the row")
    answer = extract_answer(solution_str) or ""
    pred, text, number = normalized(answer), _without_box(answer), number_in(str(ground_truth))
    is_number = number is not None and last_boxed(text) is None and number_in(text) == number
    correct = pred == reference or is_number
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": reference if correct else pred}
