"""Comparison of answers by math-verify, for a separate process whose caller ends work that hangs."""

from __future__ import annotations

import logging
from typing import Any

import math_verify
from math_verify import LatexExtractionConfig

# math-verify warns that without its SIGALRM, which threads cannot use, the caller must end hung work; the pool does.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def verify_latex(answer: str, reference: str) -> bool:
    """True if the answer equals the reference; False too for an answer that cannot be read or compared.

    Raises ValueError when the reference cannot be read, and MemoryError.
    """
    gold = _parse(reference)
    if not gold:
        raise ValueError(f"ground truth {reference!r} is no mathematics that math-verify reads")
    try:
        target = _parse(answer)
        equal = bool(math_verify.verify(gold, target, timeout_seconds=None, raise_on_error=True))
        return equal and _agree_in_digits(gold, target)
    except MemoryError:
        raise
    except Exception:  # sympy raises errors of every kind for what it cannot compare
        return False


def _agree_in_digits(gold: list, target: list) -> bool:
    """False for two numbers that differ in their first 6 digits: math-verify compares 6 decimals, of 1e-9 too."""
    if not all(parsed and getattr(parsed[0], "is_number", False) for parsed in (gold, target)):
        return True
    wanted, given = (parsed[0].evalf(30) for parsed in (gold, target))
    # A zero has no digits (precision 1), nor has what is infinite or complex.
    if any(getattr(number, "_prec", 0) <= 1 for number in (wanted, given)):
        return True
    return bool(abs(given - wanted) <= abs(wanted) * 5e-6)


def _parse(latex: str) -> list:
    boxed = f"\\boxed{{{latex}}}"
    # None, which its type does not allow, means no limit; the caller has one.
    no_limit: Any = None
    return math_verify.parse(boxed, [LatexExtractionConfig()], parsing_timeout=no_limit, raise_on_error=True)
