"""Translates the keys of verl that a user wrote to values of scalerl's keys, with a record of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scalerl.config.foreign_keys import ConfigView, Translation
from scalerl.config.value_checks import show
from scalerl.extras.verl.keys.entry import AlreadySo, Becomes, Context, Entry, Refused
from scalerl.extras.verl.keys.vocabulary import ENTRIES


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
