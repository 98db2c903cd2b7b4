"""Translates the keys of verl that a user wrote to values of scalerl's keys, with a record of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from scalerl.config.value_checks import show
from scalerl.config.verl.entry import AlreadySo, Becomes, Context, Entry, Refused
from scalerl.config.verl.vocabulary import ENTRIES

Verdict = Literal["renamed", "already so", "refused"]


@dataclass(frozen=True)
class Translation:
    """What became of one key of verl that a user wrote.

    becomes: `key=value` of scalerl's keys, with verdict renamed; with refused `key=<...>` that only the user can write.
    origin: says in which file it was written.
    """

    key: str
    value: Any
    verdict: Verdict
    becomes: tuple[str, ...] = ()
    why: str = ""
    origin: str = ""

    @property
    def written(self) -> str:
        return f"{self.key}={show(self.value)}"

    @property
    def violation(self) -> str:
        return f"{self.key} = {show(self.value)}{self.origin}: {self.why}"


class ConfigView(Protocol):
    """The configuration that is being filled in, as far as a translation asks it."""

    def value(self, key: str) -> Any: ...
    def is_set(self, key: str) -> bool: ...
    def left_open(self, key: str) -> str | None: ...
    def resolved(self, value: Any) -> Any: ...
    def as_written(self, key: str, value: Any, source: str) -> Any: ...


@dataclass
class Translator:
    """Collects the keys of verl while a configuration is read, and translates them once all of it has been read."""

    kind: str
    _written: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def knows(self, key: str, value: Any, context: Context) -> bool:
        """Whether verl's vocabulary reads this value of `key`."""
        return _read(self.kind, key, value, context) is not None

    def add(self, key: str, value: Any, origin: str = "") -> None:
        """Keeps a key of verl until it is translated.  origin: says in which file it was written."""
        self._written[key] = (value, origin)

    def written(self, key: str) -> Any:
        return self._written[key][0] if key in self._written else None

    def translations(self, config: ConfigView) -> Iterator[tuple[Translation, Mapping[str, Any]]]:
        """Yields each translation with the values that it sets; the caller puts them in before the next."""
        context = _Context(config, self)
        # Key of scalerl -> the key of verl that has set it.
        said: dict[str, str] = {}
        for key in sorted(self._written, key=lambda key: _asks_others(self.kind, key)):
            value, origin = self._written[key]
            outcome = _read(self.kind, key, config.resolved(value), context)
            if isinstance(outcome, AlreadySo):
                yield Translation(key, value, "already so", why=outcome.why, origin=origin), {}
            elif isinstance(outcome, Refused):
                yield Translation(key, value, "refused", outcome.to_write, outcome.why, origin), {}
            elif isinstance(outcome, Becomes):
                clash = _clash(config, said, key, outcome)
                if clash is None:
                    said |= dict.fromkeys(outcome.values, key)
                    values = {
                        name: config.as_written(name, new, key) if new == value else new
                        for name, new in outcome.values.items()
                    }
                    becomes = tuple(f"{name}={show(new)}" for name, new in values.items())
                    yield Translation(key, value, "renamed", becomes, outcome.why, origin), values
                else:
                    yield Translation(key, value, "refused", why=clash, origin=origin), {}


# Keys that several keys of verl set, with their limits of time: the last value counts.
_SHARED = ("trainer.timeout_s",)


def _clash(config: ConfigView, said: Mapping[str, str], key: str, outcome: Becomes) -> str | None:
    """The reason to refuse where something else has set one of the keys to another value; None where nothing has."""
    for name, value in outcome.values.items():
        is_free = name == key or outcome.overrules or (name in _SHARED and name in said)
        if is_free or not (config.is_set(name) or name in said) or "${" in str(value) or config.value(name) == value:
            continue
        by = f" by {said[name]}" if name in said else ""
        return f"is {name} here, which is {show(config.value(name))}{by}; leave one of them out"
    return None


@dataclass(frozen=True)
class _Context:
    config: ConfigView
    translator: Translator

    def value(self, key: str) -> Any:
        return self.config.value(key)

    def is_set(self, key: str) -> bool:
        return self.config.is_set(key)

    def left_open(self, key: str) -> str | None:
        return self.config.left_open(key)

    def foreign(self, key: str) -> Any:
        return self.translator.written(key)


def entry_of(kind: str, key: str) -> Iterator[tuple[Entry, re.Match[str]]]:
    """The entries whose pattern fits a key, each with its match."""
    for entry in ENTRIES.get(kind, ()):
        if match := entry.regex.fullmatch(key):
            yield entry, match


def _asks_others(kind: str, key: str) -> bool:
    return any(entry.asks_others for entry, _ in entry_of(kind, key))


def _read(kind: str, key: str, value: Any, context: Context) -> AlreadySo | Becomes | Refused | None:
    outcomes = (entry.read(match, value, context) for entry, match in entry_of(kind, key))
    return next((outcome for outcome in outcomes if outcome is not None), None)


def translation_table(translations: list[Translation]) -> str:
    """The text in which a run lists the keys of verl that it was given; "" if there are none."""
    renamed = [
        (key.written, f"-> {' '.join(key.becomes)}{f'  ({key.why})' if key.why else ''}")
        for key in translations
        if key.verdict == "renamed"
    ]
    same = [(key.written, key.why) for key in translations if key.verdict == "already so"]
    blocks = []
    if renamed:
        blocks.append("keys of verl, and what they are here:\n" + _columns(renamed))
    if same:
        blocks.append("keys of verl with nothing to set, already so here:\n" + _columns(same))
    return "\n".join(blocks)


def _columns(rows: list[tuple[str, str]]) -> str:
    width = min(max(len(written) for written, _ in rows), 90)
    return "\n".join(f"  {written:<{width}}  {meaning}" for written, meaning in rows)
