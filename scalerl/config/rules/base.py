"""`Rule`, a relation between keys, and `@rule("a.key", "another.key")`, which makes one from a function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """A relation between `keys`; checked only where each of them is inside its own domain.

    check: the violations of a configuration, "key = value: limit; what to set" each.
    """

    keys: tuple[str, ...]
    check: Callable[[Any], Iterator[str]]


def rule(*keys: str) -> Callable[[Callable[[Any], Iterator[str]]], Rule]:
    """Decorator that turns a function, which yields violations, into a rule between these keys."""
    return functools.partial(Rule, keys)


def value_at(cfg: Any, key: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(getattr, key.split("."), cfg)
