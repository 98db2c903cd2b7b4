"""Reward rule of MATH: compares the content of the response's last \\boxed{} with the reference, as mathematics."""

from __future__ import annotations

import functools
import os
import re
from fractions import Fraction
from typing import Any

from scalerl.rewards.answer_text import tidied
from scalerl.rewards.errors import RewardError
from scalerl.rewards.function_processes import CallFailed, CallTimeout, ProcessPool

# Must be below reward_model.timeout_s, or the deadline of the sample passes first.
TIMEOUT_S = 10.0
# The longest answer of MATH has 159 characters; longer ones would take the parser too much time.
MAX_ANSWER_CHARS = 1000
MEMORY_BYTES = 2 * 1024**3
# "42$", "3 + x\\)", "42 and so on".
_BARE = re.compile(r"(?![A-Za-z]{2})(?:(?P<formula>[^$\n]+?)(?:\$|\\\)|\\\])|(?P<word>[^\s$]+))")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:\\?%|percent)\s*\})$")
# 1,234.5, with or without \\times 10^{6}; a fraction of two integers.
_DECIMAL = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<digits>\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?|\d*\.?\d+|\d+\.)"
    r"(?:\s*(?:\\times|\\cdot)\s*10\s*\^\s*(?:\{\s*(?P<power>[-+]?\d{1,3})\s*\}|(?P<digit>\d)))?"
)
_RATIO = re.compile(r"([-+]?)\s*(?:\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d+)\s*/\s*(\d+))")
_IN_BASE = re.compile(r"([0-9A-F]*\d[0-9A-F]*)_([2-9]|[1-3]\d)")
_FONT = re.compile(r"\\(?:text|math)[a-z]*\{([^{}]*)\}")
# Written "x < 2" or "1 \\le x < 2" for an interval.
_RELATION = r"(<|>|\\leq?(?![A-Za-z])|\\geq?(?![A-Za-z]))"
_BETWEEN = re.compile(rf"([^<>]+?)\s*{_RELATION}\s*[a-z]\s*{_RELATION}\s*([^<>]+)")
_BOUND = re.compile(rf"[a-z]\s*{_RELATION}\s*([^<>=]+)")


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
    Equal: the same text or number, the same digits in the same base, or equal by math-verify 0.9.0 (sets, intervals,
    formulas, units dropped). Decimals must have 6 digits to equal what has no finite decimal. 50\\% equals 50 and 0.5.
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
    if answer == reference:
        return True
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    answer, reference = tidied(answer), tidied(reference)
    if _letters(answer) == _letters(reference):
        return True
    digits = _without_base(answer, reference)
    if digits is None:
        return False
    answer, reference = digits
    pair, num_percent = zip(*(_PERCENT.subn("", text) for text in (answer, reference)), strict=True)
    number, wanted = map(_number, pair)
    if number is not None and wanted is not None:
        if _is_same_number(number, wanted):
            return True
        # 0.5 is 50%, but 50 is not 5000%: whoever asks for 50 may ask for percent.
        share, percentage = (number, wanted) if num_percent[1] else (wanted, number)
        is_share = num_percent[0] != num_percent[1] and (share.denominator > 1 or abs(share) <= 1)
        return is_share and share * 100 == percentage
    return _verified(*map(_as_interval, pair))


def _verified(answer: str, reference: str) -> bool:
    try:
        return _pool().call(TIMEOUT_S, {"answer": answer, "reference": reference})
    except CallTimeout:
        cause = f"not compared in {TIMEOUT_S:g} s"
    except CallFailed as failed:
        cause = str(failed)
    raise RewardError(f"math: {answer!r:.200} against {reference!r:.200}: {cause}")


def _letters(latex: str) -> str:
    """The text of an answer without the commands that only set its font, and without spaces and stops in it."""
    return re.sub(r"\s|\.(?!\d)", "", _FONT.sub(r"\1", latex))


def _without_base(answer: str, reference: str) -> tuple[str, str] | None:
    """Both answers without the base that their digits have, or that one leaves out; None if the bases differ."""
    bare = [re.sub(r"[{}(),\s]", "", _FONT.sub(r"\1", text)).replace("_two", "_2") for text in (answer, reference)]
    based = [_IN_BASE.fullmatch(text) for text in bare]
    if based[0] and based[1] and based[0][2] != based[1][2]:
        return None
    if not any(based):
        return answer, reference
    digits = [match[1] if match else text for match, text in zip(based, bare, strict=True)]
    return digits[0], digits[1]


def _number(text: str) -> Fraction | None:
    text = re.sub(r"^([-+]?)(?=10\s*\^)", r"\g<1>1\\cdot ", text)
    if decimal := _DECIMAL.fullmatch(text):
        value = Fraction(decimal["digits"].replace("{", "").replace("}", "").replace(",", "").removesuffix("."))
        value *= Fraction(10) ** int(decimal["power"] or decimal["digit"] or 0)
        return -value if decimal["sign"] == "-" else value
    ratio = _RATIO.fullmatch(text)
    if ratio is None or not int(ratio[3] or ratio[5]):
        return None
    value = Fraction(int(ratio[2] or ratio[4]), int(ratio[3] or ratio[5]))
    return -value if ratio[1] == "-" else value


def _is_same_number(answer: Fraction, reference: Fraction) -> bool:
    """True for the same number, or one decimal with 6 digits of what has no finite decimal."""
    if answer == reference or _is_finite_decimal(answer) == _is_finite_decimal(reference):
        return answer == reference
    return abs(answer - reference) <= abs(reference) / 10**6


def _is_finite_decimal(number: Fraction) -> bool:
    denominator = number.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def _as_interval(text: str) -> str:
    """The interval that an inequality of one letter is; other text as it is."""
    if (between := _BETWEEN.fullmatch(text)) and ("<" in between[2] or "l" in between[2]):
        low, left, right, high = between.groups()
        return f"{'(' if left == '<' else '['}{low},{high}{')' if right == '<' else ']'}"
    if bound := _BOUND.fullmatch(text):
        relation, value = bound.groups()
        if relation == "<" or "l" in relation:
            return rf"(-\infty,{value}{')' if relation == '<' else ']'}"
        return rf"{'(' if relation == '>' else '['}{value},\infty)"
    return text


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
