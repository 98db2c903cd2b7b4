"""What an error message suggests: valid numbers near an invalid one, the name that a misspelt one was meant to be."""

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


def is_misspelt(written: str, known: str, *, replaceable: int = 4) -> bool:
    """Whether a name is another one, misspelt: word by word, or with letters lost, doubled or swapped in all of it.

    Words are what underscores separate. Another short word in the place of one is another name, not a slip: `gpg` is
    not `kl`.  replaceable: letters from which on a word may have another letter in the place of one.
    """
    words, meant = written.split("_"), known.split("_")
    if len(words) == len(meant) and all(_is_slip(*pair, replaceable) for pair in zip(words, meant, strict=True)):
        return True
    return _is_short_slip(written.replace("_", ""), known.replace("_", ""))


def _is_slip(written: str, known: str, replaceable: int) -> bool:
    short = min(len(written), len(known))
    return (
        written == known
        or (short >= 3 and _is_short_slip(written, known))
        or (short >= 4 and _letters_lost(written, known) in (1, 2))
        or (
            short >= 5
            and (written.startswith(known) or known.startswith(written))
            and abs(len(written) - len(known)) <= 3
        )
        or (short >= replaceable and _distance(written, known) == 1)
        or (short >= 8 and _distance(written, known) == 2)
    )


def _is_short_slip(written: str, known: str) -> bool:
    """Whether the words are equal but for one letter that is lost or too much, or for two neighbours that swapped."""
    return (
        written == known
        or _letters_lost(written, known) == 1
        or (sorted(written) == sorted(known) and _distance(written, known) == 1)
    )


def _letters_lost(a: str, b: str) -> int | None:
    """How many letters one word has more than the other, whose letters it has in the same order; None otherwise."""
    short, long = sorted((a, b), key=len)
    letters = iter(long)
    return len(long) - len(short) if all(letter in letters for letter in short) else None


def _distance(a: str, b: str) -> int:
    """The fewest letters to add, drop, replace or swap with their neighbour that make one word of the other."""
    rows = [list(range(len(b) + 1))]
    for i in range(1, len(a) + 1):
        row = [i]
        for j in range(1, len(b) + 1):
            best = min(rows[i - 1][j] + 1, row[j - 1] + 1, rows[i - 1][j - 1] + (a[i - 1] != b[j - 1]))
            if i > 1 and j > 1 and a[i - 1] == b[j - 2] and a[i - 2] == b[j - 1]:
                best = min(best, rows[i - 2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]
