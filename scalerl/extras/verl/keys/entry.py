"""`Entry`, one line of verl's vocabulary: a pattern of keys, and what scalerl makes of their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from scalerl.config.value_checks import show


@dataclass(frozen=True)
class Becomes:
    """Outcome of a value that other keys express here, or another value of the same key.

    overrules: the values replace those that the user set there, which have been taken into account.
    """

    values: Mapping[str, Any]
    why: str = ""
    overrules: bool = False


@dataclass(frozen=True)
class AlreadySo:
    """Outcome of a value that asks for what scalerl does in any case: there is nothing to set."""

    why: str


@dataclass(frozen=True)
class Refused:
    """Outcome of a value that asks for what scalerl does not do.

    why: completes "KEY = VALUE: ".  to_write: `key=<...>` of scalerl's keys without whose value a run would do less.
    """

    why: str
    to_write: tuple[str, ...] = ()


Outcome = Becomes | AlreadySo | Refused


class Context(Protocol):
    """The rest of the configuration, as the reading of one key sees it."""

    def value(self, key: str) -> Any:
        """The present value of a key of scalerl; None where it cannot be resolved."""
        ...

    def is_set(self, key: str) -> bool:
        """Whether the user wrote this key of scalerl."""
        ...

    def left_open(self, key: str) -> str | None:
        """The text that a shell replaces by the value of a key of scalerl; None where no shell does."""
        ...

    def foreign(self, key: str) -> Any:
        """The value that the user wrote for a key of verl; None if there is none."""
        ...


Read = Callable[[re.Match[str], Any, Context], Outcome | None]


@dataclass(frozen=True)
class Entry:
    """A pattern of verl's keys, with the function that reads their values.

    pattern: dotted key; `*` is one part, `**` the rest, `(a|b)` either.
    said: what becomes of the keys, for the documentation.
    read: (match, value, context) -> outcome; None: the value is not verl's, and is read like any other.
    asks_others: the outcome follows from other keys, which may be verl's too and are translated first.
    """

    pattern: str
    said: str
    why: str
    read: Read = field(compare=False)
    asks_others: bool = False

    @property
    def regex(self) -> re.Pattern[str]:
        return _compiled(self.pattern)


_COMPILED: dict[str, re.Pattern[str]] = {}


def _compiled(pattern: str) -> re.Pattern[str]:
    if pattern not in _COMPILED:
        text = pattern.replace(".", r"\.").replace("**", "\0").replace("*", "[^.]+").replace("\0", ".+")
        _COMPILED[pattern] = re.compile(text)
    return _COMPILED[pattern]


def is_one_of(value: Any, options: tuple[Any, ...]) -> bool:
    """Whether the options contain a value, where 0 is not false and texts are compared without regard to case."""
    folded = _folded(value)
    return any(isinstance(option, bool) == isinstance(value, bool) and _folded(option) == folded for option in options)


def _is_section(value: Any) -> bool:
    """Whether a value, of a YAML file, is a section with keys, which are read one by one."""
    return isinstance(value, dict) and bool(value)


def _folded(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def same(pattern: str, *allowed: Any, why: str) -> Entry:
    """An entry of keys whose allowed values ask for what scalerl always does; no allowed values: every value does."""

    def read(_: re.Match[str], value: Any, __: Context) -> Outcome | None:
        if not allowed and _is_section(value):
            return None
        if not allowed or is_one_of(value, allowed):
            return AlreadySo(why)
        return Refused(f"{why}; leave it out")

    said = f"{_listed(allowed)}: already so" if allowed else "already so"
    return Entry(pattern, said, why, read)


def renamed(
    pattern: str,
    target: str,
    *,
    why: str = "",
    convert: Callable[[Any], Any] | None = None,
    only: Any = ...,
    neutral: tuple[Any, ...] = (),
) -> Entry:
    r"""An entry of keys whose value goes to `target`, in which \1 stands for the first group of the pattern.

    only: the values that are read; no others are.  convert: changes the value's unit or spelling.  neutral: values that
    ask for nothing.
    """

    def read(match: re.Match[str], value: Any, _: Context) -> Outcome | None:
        if only is not ... and not is_one_of(value, only):
            return None
        if is_one_of(value, neutral):
            return AlreadySo(f"asks for what is so without {match.expand(target)}")
        return Becomes({match.expand(target): value if convert is None else convert(value)}, why)

    said = f"`{target}`" if only is ... or convert is None else f"{_listed(only)}: {_listed((convert(only[0]),))}"
    return Entry(pattern, re.sub(r"\\\d", "...", said), why, read)


def absent(pattern: str, *neutral: Any, why: str, instead: str = "leave it out") -> Entry:
    """An entry of keys without counterpart; the neutral values ask for nothing.  why: completes "because"."""

    def read(_: re.Match[str], value: Any, __: Context) -> Outcome:
        if is_one_of(value, neutral):
            return AlreadySo(f"asks for nothing ({why})")
        return Refused(f"has no counterpart because {why}; {instead}")

    said = f"{_listed(neutral)}: already so; else no counterpart" if neutral else "no counterpart"
    return Entry(pattern, said, why if instead == "leave it out" else f"{why}; {instead}", read)


def goes_with(pattern: str, switch: str) -> Entry:
    """An entry of keys that only detail what another key switches on; that key is checked instead."""
    why = f"counts only with {switch}"
    return Entry(pattern, "already so", why, lambda _, value, __: None if _is_section(value) else AlreadySo(why))


def written_by_user(pattern: str, *neutral: Any, key: str, what: str, why: str) -> Entry:
    """An entry of keys whose work is done by what the user writes and names in a key of scalerl.

    neutral: values that ask for nothing.  what: is named in `key`, for example program.  why: completes "because".
    """

    def read(_: re.Match[str], value: Any, context: Context) -> Outcome:
        if is_one_of(value, neutral) or context.value(key) or context.left_open(key):
            return AlreadySo(why)
        return Refused(f"{why}; write it (docs/extending.md) and set {key}", (f"{key}=<your {what}>",))

    return Entry(pattern, f"{_listed(neutral)}, or with `{key}` set: already so; else refused", why, read)


def computed(pattern: str, said: str, why: str, read: Read, *, asks_others: bool = False) -> Entry:
    """An entry of keys whose outcome `read` computes, for example from other keys."""
    return Entry(pattern, said, why, read, asks_others)


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join(f"`{show(value)}`" for value in values)
