"""Numbers near a wrong one that would be right, as a message suggests them."""

from __future__ import annotations

import math


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
