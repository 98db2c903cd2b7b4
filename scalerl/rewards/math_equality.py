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
        return bool(math_verify.verify(gold, target, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # sympy raises errors of every kind for what it cannot compare
        return False


def _parse(latex: str) -> list:
    boxed = f"\\boxed{{{latex}}}"
    # None, which its type does not allow, means no limit; the caller has one.
    no_limit: Any = None
    return math_verify.parse(boxed, [LatexExtractionConfig()], parsing_timeout=no_limit, raise_on_error=True)
