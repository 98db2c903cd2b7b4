"""Numbers of a data set as the text that a response should have, and numbers that are no answer."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from scalerl.data.problems import FileProblems

# Decimal digits that a number of 64 bits can hold: where it shows more, the last ones are of its rounding.
_MAX_DIGITS = 15
_MISSING = ("nan", "none", "null", "nat", "na", "n/a", "<na>")


def number_text(value: int | float | Decimal) -> str:
    """A number without exponent and needless zeros: 72 for 72.0, 10000000000000000 for 1e16.

    Raises ValueError for a number that is none (NaN, infinite), shows its rounding (0.30000000000000004), or is a
    truth value.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value}, a truth value")
    if isinstance(value, int):
        return str(value)
    number = Decimal(repr(value)) if isinstance(value, float) else value
    if not number.is_finite():
        raise ValueError(f"{value}, which is no number")
    if isinstance(value, float) and len(number.normalize().as_tuple().digits) > _MAX_DIGITS:
        raise ValueError("a number that shows its rounding")
    text = format(number, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return text if number else "0"


def check_numbers(texts: Sequence[tuple[int, str]], column: str, problems: FileProblems) -> None:
    """Adds a problem for texts that are no answers in a column whose other texts are all numbers.

    They are words for a missing value, exponents, and the roundings of a program that wrote them.
    texts: (row, text).
    """
    shown_of = {row: text.strip().replace(",", "") for row, text in texts}
    try:
        numbers = {row: Decimal(shown) for row, shown in shown_of.items() if shown.lower() not in _MISSING}
    except InvalidOperation:
        return
    if not any(number.is_finite() for number in numbers.values()):
        return
    for row, shown in shown_of.items():
        number = numbers.get(row)
        if number is None or not number.is_finite():
            _add("no number, where the other rows have one", row, column, shown, problems)
        elif "e" in shown.lower():
            _add("a number with an exponent", row, column, shown, problems)
        elif "." in shown and len(number.normalize().as_tuple().digits) > _MAX_DIGITS and repr(float(shown)) == shown:
            _add("a number that shows its rounding", row, column, shown, problems)


def _add(what: str, row: int, column: str, text: str, problems: FileProblems) -> None:
    problems.add(what, "write it as a response should have it, or remove the row", row=row, column=column, value=text)
