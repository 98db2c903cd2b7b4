"""Reads `table.yaml`, verl's vocabulary: a row for each pattern of keys, with what becomes of their values."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from scalerl.config.schema import MegatronConfig
from scalerl.extras.verl.keys import computed
from scalerl.extras.verl.keys.computed import Context, Outcome, is_one_of, refused

FILE = Path(__file__).with_name("table.yaml")
# The section of Megatron's engine in scalerl, without the dicts of fields of Megatron's own.
_MEGATRON_KEYS = "|".join(name for name in MegatronConfig.__dataclass_fields__ if not name.startswith("override_"))


@dataclass(frozen=True)
class Row:
    """One row of the table; the head of table.yaml says what its fields mean.

    so: a list of values, or "any".  is_own: scalerl has the keys, too; values that are not here are its own.
    """

    key: str
    so: list[Any] | str = field(default_factory=list)
    to: str = ""
    values: dict[Any, Any] = field(default_factory=dict)
    also: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    instead: str = "leave it out"
    read: Callable[[re.Match[str], Any, Context], Outcome | None] | None = None
    is_own: bool = False

    @functools.cached_property
    def regex(self) -> re.Pattern[str]:
        text = self.key.replace(".", r"\.").replace("**", "\0").replace("*", "[^.]+").replace("\0", ".+")
        return re.compile(text)

    def outcome(self, match: re.Match[str], value: Any, context: Context) -> Outcome | None:
        """What becomes of a value; None: the value is scalerl's, or a section whose keys are read one by one."""
        if self.read is not None:
            return self.read(match, value, context)
        target = match.expand(self.to) if self.to else match[0]
        if self.so == "any":
            return None if isinstance(value, dict) and value else Outcome(self.why)
        if is_one_of(value, tuple(self.so)):
            return Outcome(f"asks for what is so without {target}" if self.to and not self.values else self.why)
        if self.values:
            new = [new for old, new in self.values.items() if is_one_of(value, (old,))]
            if new:
                return Outcome(self.why, {**self.also, target: new[0]})
        elif self.to:
            return Outcome(self.why, {**self.also, target: value})
        return None if self.is_own else refused(f"{self.why}; {self.instead}")


@functools.cache
def rows_of(kind: str) -> tuple[Row, ...]:
    """The rows that a kind of configuration reads (ppo, sft, generation or eval), in their order."""
    table = _content()
    if kind not in table["kinds"]:
        return ()
    names = {**table["names"], "MEGATRON_KEYS": _MEGATRON_KEYS, **table["kinds"][kind].get("names", {})}
    blocks = table["kinds"][kind]["rows"]
    return tuple(
        _row(row, names, table["value_lists"], is_own=block.startswith("both"))
        for block in blocks
        for row in table[block]
    )


@functools.cache
def _content() -> dict[str, Any]:
    return yaml.load(FILE.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _row(raw: Mapping[str, Any], names: Mapping[str, str], lists: Mapping[str, Any], *, is_own: bool) -> Row:
    fields: dict[str, Any] = {name: _written_out(value, names) for name, value in raw.items()}
    if "with" in fields:
        fields |= {"so": "any", "why": f"counts only with {fields.pop('with')}"}
    if "read" in fields:
        fields["read"] = getattr(computed, fields["read"])
    for name in ("so", "values"):
        if name in fields and isinstance(fields[name], str):
            fields[name] = lists.get(fields[name], fields[name])
    fields |= {"key": re.sub(r"\s+", "", fields["key"]), "is_own": is_own}
    return Row(**fields)


def _written_out(value: Any, names: Mapping[str, str]) -> Any:
    """A value of the table with its names replaced by what they stand for, which may hold names, too."""
    if isinstance(value, dict):
        return {_written_out(key, names): _written_out(inner, names) for key, inner in value.items()}
    if not isinstance(value, str):
        return value
    new = re.sub(r"\b[A-Z_]+\b", lambda match: names.get(match[0], match[0]), value)
    return value if new == value else _written_out(new, names)
