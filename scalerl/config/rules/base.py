"""A rule between keys, and the one way to make it: `@rule("a.key", "another.key")` above a function."""

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
    """Makes a function that yields violations the check of a rule between these keys."""
    return functools.partial(Rule, keys)


def value_at(cfg: Any, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), cfg)
