"""Cutting a token sequence to a limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def truncate(tokens: Sequence[T], max_length: int, side: str) -> Sequence[T]:
    """At most max_length of the tokens. side: where the cut is: left | right | middle (the end keeps the odd token)."""
    if len(tokens) <= max_length:
        return tokens
    if side == "right":
        return tokens[:max_length]
    if side == "left":
        return tokens[len(tokens) - max_length :]
    if side == "middle":
        front = max_length // 2
        return [*tokens[:front], *tokens[len(tokens) - (max_length - front) :]]
    raise ValueError(f"truncation={side!r}: use left, right or middle")
