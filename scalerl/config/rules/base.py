"""What a rule between keys is, and the numbers that its message suggests."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """A relation between `keys`; checked only where each of them is inside its own domain."""

    keys: tuple[str, ...]
    check: Callable[[Any], Iterator[str]]


def value_at(cfg: Any, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), cfg)


def nearest(value: int, candidates: list[int]) -> str:
    """The closest candidates below and above."""
    below = [c for c in candidates if c <= value]
    above = [c for c in candidates if c > value]
    return " or ".join(str(c) for c in [*below[-1:], *above[:1]])


def nearest_multiples(value: int, unit: int) -> str:
    down = value // unit * unit
    return nearest(value, [m for m in (down, down + unit) if m > 0])


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def divisors_text(number: int) -> str:
    return ", ".join(map(str, divisors(number)))
