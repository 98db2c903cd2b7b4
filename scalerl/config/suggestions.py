"""The valid numbers near an invalid one, which an error message suggests."""

from __future__ import annotations

import math


def nearest(value: int, candidates: list[int]) -> str:
    """The closest candidates below (or equal) and above, as text. candidates: ascending."""
    below = [c for c in candidates if c <= value]
    above = [c for c in candidates if c > value]
    return " or ".join(str(c) for c in [*below[-1:], *above[:1]])


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of unit, above 0, that are closest to value, as text."""
    down = value // unit * unit
    return nearest(value, [m for m in (down, down + unit) if m > 0])


def divisors(number: int) -> list[int]:
    """All divisors of a number, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def divisors_text(number: int) -> str:
    """All divisors of a number, as text."""
    return ", ".join(map(str, divisors(number)))
