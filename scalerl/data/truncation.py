"""Truncation of token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def truncate(tokens: Sequence[T], max_length: int, side: str) -> Sequence[T]:
    """Cuts a sequence to at most max_length tokens.

    side: where tokens are cut: left | right | middle (the end keeps the odd token).
    """
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
