"""Keys of another system that a user wrote: what became of each, and the interface of what translates them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from scalerl.base.extras import extra
from scalerl.config.value_checks import show

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


class Translator:
    """Collects the foreign keys of one configuration, and translates them once all of it has been read.

    This one knows none: all keys must be scalerl's own. That of an extra extends it.
    """

    def knows(self, key: str, value: Any, context: ConfigView) -> bool:
        """Whether the other system's vocabulary reads this value of `key`."""
        return False

    def add(self, key: str, value: Any, origin: str = "") -> None:
        """Keeps a foreign key until it is translated.  origin: says in which file it was written."""
        raise AssertionError(f"{key} is no foreign key")

    def translations(self, config: ConfigView) -> Iterator[tuple[Translation, Mapping[str, Any]]]:
        """Yields each translation with the values that it sets; the caller puts them in before the next."""
        return iter(())


def translator(kind: str) -> Translator:
    """The translator for a configuration.  kind: ppo, sft, generation or eval."""
    make = extra("foreign_keys")
    return Translator() if make is None else make(kind)


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
