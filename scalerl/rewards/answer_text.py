"""Texts of answers as models write them: their spellings made one, and the number that a line gives."""

from __future__ import annotations

import re
from decimal import Decimal, DecimalException

# LaTeX for the characters outside ASCII that models write in answers.
_LATEX_OF = {
    **dict.fromkeys("−–—‑", "-"),
    **dict.fromkeys("\u00a0\u2009\u200a\u202f\u3000", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff€£¥₹", ""),
    **{"×": r"\times ", "·": r"\cdot ", "÷": "/", "⁄": "/", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ "},
    **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm ", "√": r"\sqrt "},
    **{"½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"},
}
_ASCII = str.maketrans(_LATEX_OF | {chr(ord("０") + digit): str(digit) for digit in range(10)})
_RAISED = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_LOWERED = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
_STYLE = re.compile(
    r"\\(?:bf|rm|it|boldmath|displaystyle|textstyle|(?:L|l)arge|(?:H|h)uge|(?:b|B)igg?[lr]?|pounds)(?![A-Za-z])"
)
_NUMBER_IN_FONT = re.compile(r"\\(?:text|math)[a-z]*\{\s*([-+]?[\d.,]*\d)\s*\}")
_ORDINAL = re.compile(r"\^\{?\s*\\(?:text|mathrm)\{(?:st|nd|rd|th)\}\s*\}?")
_SPACED_THOUSANDS = re.compile(r"(?<=\d)(?:\\,| )(?=\d{3}(?!\d))")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\[[^\]]*\])?\s*(\d+|\w)")
_FLOAT = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")
_END = re.compile(r"(?:\s|[.,;]|\\[\\,;:! ]|\\(?=$)|\\text\{\s*\.\s*\})+$")
# "<<48+24=72>>" is a calculation of GSM8K's solutions; the others are marks and spaces that models put around a number.
_MARKS = re.compile(
    r"<<[^<>]*>>|[-=]>|(?<![\w*_])[*_]+(?=\S)|(?<=\S)[*_]+(?![\w*_])"
    r"|\\[()\[\],!;: ]|\\(?:boxed|fbox|text|displaystyle|underline|math[a-z]+)|\\?\$|<(?=[\d.,]+>)|<[/|][^<>]*>"
    r"|[`\"“”{}|]|(?<!\w)'|'(?!\w)"
)
_EQUAL = re.compile(r"\\(?:approx|equiv)(?![a-zA-Z])")
_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
_POWER = re.compile(r"\^\s*\{\s*([-+]?\d+)\s*\}")
_LEAD = re.compile(
    r"[\s:(\[~≈→]*(?:(?:the\s+)?(?:final\s+)?(?:answer|total|result)\b(?:\s+is\b)?[\s:=]*|(?:it|there)\s+(?:is|are)\s+)?"
    r"(?:(?:about|approximately|around|exactly)\s+|[~≈]\s*)?(?:(?:us|usd|rs\.?)\s*(?=[-\d]))?",
    re.IGNORECASE,
)
# Commas and spaces count only between groups of three digits, or of two before the last three (Indian).
_DIGITS = (
    r"(?:\d{1,3}(?:,\d{3})+(?![,\d])|\d{1,2}(?:,\d{2})+,\d{3}(?![,\d])|\d{1,3}(?:[ _']\d{3})+(?!\d)|\d+(?!,?\d))"
    r"(?:\.\d+)?|\.\d+"
)
_NUMBER = re.compile(
    rf"(?P<sign>[-+]\s*|(?:minus|negative)\s+)?(?P<digits>{_DIGITS})"
    r"(?:e(?P<exponent>[-+]?\d+)"
    r"|\s*(?:x|\*|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*(?P<power_of_ten>[-+]?\d+)"
    r"|\s*(?:\^|\*\*)\s*(?P<power>-?\d{1,3})"
    r"|\s*/\s*(?P<divisor>\d+)"
    r"|\s+(?P<part>\d+)\s*/\s*(?P<part_divisor>\d+)"
    r"|\s*(?P<scale>k|thousand|million|billion)(?!\w))?",
    re.IGNORECASE,
)
_SCALES = {"k": 3, "thousand": 3, "million": 6, "billion": 9}
# What shows that the number before is not the answer, but a part of one: "10-12", "5 or 6", "12:30", "5 hours 30".
_CONTINUES = re.compile(
    r"\s*(?:[-+*/:^_,.'x]|\\times|\\cdot)?\s*\d|\s*[+*^<>?]\s*\w|\s*\(?or\b|[abiknpqrxyz](?!\w)"
    r"|\s*\\(?!mbox|q?quad|circ|l?dots)[a-z]|\s*[a-z]*,?\s+(?:(?:and|or|to)\s+)?\d|'",
    re.IGNORECASE,
)


def in_ascii(text: str) -> str:
    """Text with LaTeX for the signs, fractions, raised digits and spaces outside ASCII; money and zero widths go."""
    return _RAISED.sub(lambda raised: f"^{{{raised[0].translate(_LOWERED)}}}", text).translate(_ASCII)


def tidied(latex: str) -> str:
    """An answer in the LaTeX of ASCII, without sizes, fonts, money, ordinals, and stops and spaces at its end."""
    text = _ORDINAL.sub("", _STYLE.sub("", in_ascii(latex).replace("~", " ").replace(r"\text{-}", "-")))
    text = text.replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    text = _NUMBER_IN_FONT.sub(r"\1", text)
    text = _SHORT_ROOT.sub(r"\\sqrt\1{\2}", _SPACED_THOUSANDS.sub("", text))
    text = _FLOAT.sub(r"\1\\times 10^{\2}", _REPEATING.sub(_fraction_of_repeating, text))
    return _END.sub("", re.sub(r"\\?\$", "", text)).strip()


def _fraction_of_repeating(decimal: re.Match[str]) -> str:
    whole, part, period = decimal.groups()
    nines = (10 ** len(period) - 1) * 10 ** len(part)
    return rf"\frac{{{int(whole + part + period) - int(whole + part or 0)}}}{{{nines}}}"


def number_in(text: str) -> Decimal | None:
    """The number that a line of text gives as its answer; None if it gives none, or more than one.

    Signs of Markdown, LaTeX and money around it, a unit behind it, and "the answer is" before it do not count. It may
    be an integer, a decimal, a fraction (5/2, 3 1/2) or a power (1e3, 2 x 10^3, 10^3), with commas or thin spaces
    between groups of three digits. Of an equation it is the side that is one number.
    """
    numbers = {_value(match) for match in _numbers_at_start(text) if not _CONTINUES.match(match.string, match.end())}
    numbers.discard(None)
    return numbers.pop() if len(numbers) == 1 else None


def begins_with_number(text: str) -> bool:
    """True if a line of text, or a side of its equation, begins with a number, behind what `number_in` skips."""
    return bool(_numbers_at_start(text))


def _numbers_at_start(text: str) -> list[re.Match[str]]:
    """The number that each side of an equation begins with, behind what may stand before an answer."""
    text = _POWER.sub(r"^\1", _FRACTION.sub(r" \1\2/\3\4", _COMMA.sub(",", _EQUAL.sub("=", in_ascii(text)))))
    starts = [(side, _LEAD.match(side)) for side in _MARKS.sub("", text).split("=")]
    matches = [_NUMBER.match(side, lead.end() if lead else 0) for side, lead in starts]
    return [match for match in matches if match]


def _value(number: re.Match[str]) -> Decimal | None:
    value = Decimal(re.sub("[, _']", "", number["digits"]))
    try:
        if number["exponent"] or number["power_of_ten"]:
            value = value.scaleb(int(number["exponent"] or number["power_of_ten"]))
        elif number["power"]:
            value **= int(number["power"])
        elif number["scale"]:
            value = value.scaleb(_SCALES[number["scale"].lower()])
        elif number["divisor"]:
            value /= int(number["divisor"])
        elif number["part"]:
            value += Decimal(number["part"]) / int(number["part_divisor"])
    except (DecimalException, ValueError):  # a division by zero, an exponent that no number has
        return None
    return value.copy_negate() if (number["sign"] or "+").strip() != "+" else value
