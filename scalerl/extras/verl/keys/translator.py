"""Translates the keys of verl that a user wrote to values of scalerl's keys, with a record of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scalerl.config import foreign_keys
from scalerl.config.foreign_keys import ConfigView, Translation
from scalerl.config.keys import key_table
from scalerl.config.schema import SCHEMAS
from scalerl.config.value_checks import show
from scalerl.extras.verl.keys.computed import Context, Outcome
from scalerl.extras.verl.keys.table import Row, rows_of

# Keys of scalerl that several keys of verl set, with their limits of time: the last value counts.
_SHARED = ("trainer.timeout_s",)


@dataclass
class Translator(foreign_keys.Translator):
    """Collects the keys of verl while a configuration is read, and translates them once all of it has been read.

    kind: of the configuration: ppo, sft, generation or eval.
    """

    kind: str
    _written: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def knows(self, key: str, value: Any, context: ConfigView) -> bool:
        """Whether verl's vocabulary reads this value of `key`."""
        return self._outcome(key, value, Context(context, self._foreign)) is not None

    def add(self, key: str, value: Any, origin: str = "") -> None:
        """Keeps a key of verl until it is translated.  origin: says in which file it was written."""
        self._written[key] = (value, origin)

    def written(self, key: str) -> Any:
        """The value that was added for a key; None if there is none."""
        return self._written[key][0] if key in self._written else None

    def _foreign(self, key: str) -> Any:
        names = (key, re.sub("^megatron", "engine", key))
        return next((value for name in names if (value := self.written(name)) is not None), None)

    def translations(self, config: ConfigView) -> Iterator[tuple[Translation, Mapping[str, Any]]]:
        """Yields each translation with the values that it sets; the caller puts them in before the next."""
        context = Context(config, self._foreign)
        # Key of scalerl -> the key of verl that has set it.
        said: dict[str, str] = {}
        # Outcomes that are computed may follow from keys that others set.
        for key in sorted(self._written, key=self._is_computed):
            value, origin = self._written[key]
            outcome = self._outcome(key, config.resolved(value), context)
            if outcome is None:
                continue
            if clash := _clash(config, said, key, outcome):
                outcome = Outcome(clash, is_refused=True)
            if outcome.is_refused:
                yield Translation(key, value, "refused", outcome.to_write, outcome.why, origin), {}
            elif not outcome.values:
                yield Translation(key, value, "already so", why=outcome.why, origin=origin), {}
            else:
                said |= dict.fromkeys(outcome.values, key)
                values = {
                    name: config.as_written(name, new, key) if new == value else new
                    for name, new in outcome.values.items()
                }
                becomes = tuple(f"{name}={show(new)}" for name, new in values.items())
                yield Translation(key, value, "renamed", becomes, outcome.why, origin), values

    def _is_computed(self, key: str) -> bool:
        row, _ = next(self._rows(key), (None, None))
        return row is not None and row.read is not None

    def _outcome(self, key: str, value: Any, context: Context) -> Outcome | None:
        outcomes = (row.outcome(match, value, context) for row, match in self._rows(key))
        return next((outcome for outcome in outcomes if outcome is not None), None)

    def _rows(self, key: str) -> Iterator[tuple[Row, re.Match[str]]]:
        """The rows that fit a key. Of scalerl's own keys only those count that have other values in verl."""
        kind = key_table(SCHEMAS[self.kind]).kind(key) if self.kind in SCHEMAS else "unknown"
        for name in filter(None, (_alias(key), key)):
            is_foreign, is_own = kind == "unknown" and name == key, kind in ("leaf", "section")
            for row in rows_of(self.kind):
                counts = not row.is_own if is_foreign else row.is_own or not is_own
                if counts and (match := row.regex.fullmatch(name)):
                    yield row, match


def _alias(key: str) -> str | None:
    """The key of the section `megatron` as which a field of verl's section `engine` is read; None where it is none."""
    alias = re.sub(r"^engine\.(?=override_\w+_config\.)", "megatron.", key)
    return None if alias == key else alias


def _clash(config: ConfigView, said: Mapping[str, str], key: str, outcome: Outcome) -> str | None:
    """The reason to refuse where something else has set one of the keys to another value; None where nothing has."""
    for name, value in outcome.values.items():
        is_free = name == key or outcome.overrules or (name in _SHARED and name in said)
        if is_free or not (config.is_set(name) or name in said) or "${" in str(value) or config.value(name) == value:
            continue
        by = f" by {said[name]}" if name in said else ""
        return f"is {name} here, which is {show(config.value(name))}{by}; leave one of them out"
    return None
