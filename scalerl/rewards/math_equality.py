"""math-verify, as it runs in a process of its own: it ends hung work by SIGALRM, which threads cannot have."""

from __future__ import annotations

import logging
from typing import Any

import math_verify
from math_verify import LatexExtractionConfig

# It warns, once, that without its alarm the caller must end hung work: the pool does.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def verify_latex(answer: str, reference: str) -> bool:
    """False for an answer that cannot be read or compared. Raises ValueError when the reference cannot be read, and
    MemoryError."""
    gold = _parse(reference)
    if not gold:
        raise ValueError(f"ground truth {reference!r} is no mathematics that math-verify reads")
    try:
        target = _parse(answer)
        return bool(math_verify.verify(gold, target, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # sympy raises of every kind at what cannot be compared
        return False


def _parse(latex: str) -> list:
    boxed = f"\\boxed{{{latex}}}"
    # None, which its type leaves out, is no limit: the caller has one.
    no_limit: Any = None
    return math_verify.parse(boxed, [LatexExtractionConfig()], parsing_timeout=no_limit, raise_on_error=True)
