"""The dotted keys that exist with their types, and the known key that a misspelt one was meant to be."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from scalerl.config.schema.fields import domains_of
from scalerl.config.value_checks import Domain

KeyKind = Literal["leaf", "section", "free", "unknown"]
# Sections of models that a run may do without.
_OTHER_MODELS = ("critic.", "reward_model.")
# Sections whose keys users write as those of the model.
_USUAL_SECTIONS = ("optim", "megatron")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A key that holds a value. `owner` is the dataclass of its section, which declares or inherits `name`."""

    key: str
    owner: type
    name: str
    annotation: Any

    @property
    def is_free_dict(self) -> bool:
        """Whether the keys below this one are the user's own."""
        return typing.get_origin(self.annotation) is dict

    @property
    def is_text(self) -> bool:
        """Whether the value is a text, or a list or dict of texts."""
        return _text_type(self.annotation) or (self.domain is not None and self.domain.is_text)

    @property
    def domain(self) -> Domain | None:
        """The values that the key may have; None where every value of its type is allowed."""
        return domains_of(self.owner).get(self.name)

    def allows(self, value: Any) -> bool:
        """Whether the key may have this value of its type."""
        return self.domain is None or self.domain.allows(value)

    @property
    def type_text(self) -> str:
        """The type as a user reads it, such as `int | null`."""
        text = self.annotation.__name__ if isinstance(self.annotation, type) else str(self.annotation)
        if self.is_free_dict:
            return "dict"
        if typing.get_origin(self.annotation) is list:
            return f"list[{typing.get_args(self.annotation)[0].__name__}]"
        return text.replace("typing.", "").replace("None", "null").replace("Any", "any")


def _text_type(annotation: Any) -> bool:
    """Whether a type is str, or a list or dict of it; null may be allowed, too."""
    inner = [each for each in typing.get_args(annotation) if each is not type(None)]
    return annotation is str or (bool(inner) and _text_type(inner[-1]))


def leaves(schema: type, prefix: str = "") -> Iterator[Leaf]:
    """The keys of a dataclass that hold a value, in the order of the source."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        annotation = hints[field.name]
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            yield from leaves(annotation, f"{prefix}{field.name}.")
        else:
            yield Leaf(prefix + field.name, schema, field.name, annotation)


@functools.cache
def defaults_of(schema: type) -> DictConfig:
    """The schema with its defaults. Callers never change it."""
    return OmegaConf.structured(schema)


@functools.cache
def raw_defaults(schema: type) -> dict[str, Any]:
    """Maps each key to its default; that of a key whose default follows from other keys is an interpolation."""
    raw: Any = OmegaConf.to_container(defaults_of(schema), resolve=False)
    keys = [leaf.key for leaf in leaves(schema)]
    return {key: functools.reduce(lambda node, part: node[part], key.split("."), raw) for key in keys}


@functools.cache
def default_sources(schema: type) -> dict[str, list[str]]:
    """Maps each key whose default follows from other keys to these."""
    found = {key: re.findall(r"\$\{([\w.]+)\}", str(value)) for key, value in raw_defaults(schema).items()}
    return {key: sources for key, sources in found.items() if sources}


@functools.cache
def inherited_keys(schema: type) -> dict[str, str]:
    """Maps each key whose default is the value of another key to that other key."""
    defaults = raw_defaults(schema)
    return {key: of[0] for key, of in default_sources(schema).items() if defaults[key] == f"${{{of[0]}}}"}


@functools.cache
def key_table(schema: type) -> KeyTable:
    """Callers never change it."""
    return KeyTable(schema)


class KeyTable:
    """All keys and sections of one schema, in which wrong keys are looked up."""

    def __init__(self, schema: type) -> None:
        self.leaves = {leaf.key: leaf for leaf in leaves(schema)}
        self.inherited = inherited_keys(schema)
        self.sections = {key.rsplit(".", depth)[0] for key in self.leaves for depth in range(1, key.count(".") + 1)}

    def kind(self, key: str) -> KeyKind:
        """Says what a key is: "free" is a key of the user's own below a dict."""
        if key in self.leaves:
            return "leaf"
        if key in self.sections:
            return "section"
        return "unknown" if self._dict_above(key) is None else "free"

    def is_text(self, key: str) -> bool:
        """Whether a key, also one in a dict of the user's own, holds text, or a list or dict of texts."""
        leaf = self.leaves.get(key) or self._dict_above(key)
        return leaf is not None and leaf.is_text

    def _dict_above(self, key: str) -> Leaf | None:
        parts = key.split(".")
        parents = (self.leaves.get(".".join(parts[:end])) for end in range(1, len(parts)))
        return next((leaf for leaf in parents if leaf is not None and leaf.is_free_dict), None)

    def children(self, section: str) -> list[str]:
        """The names of the keys and sections right below a section."""
        names = (key.removeprefix(section + ".").split(".")[0] for key in self.leaves if key.startswith(section + "."))
        return list(dict.fromkeys(names))

    def nearest(self, key: str) -> str | None:
        """The known key that `key` is a misspelling of, or the end of; None where no key or several are near enough."""
        section, _, last = key.rpartition(".")
        known = [*self.leaves, *sorted(self.sections)]
        ends = [name for name in known if name.endswith(f".{key}")]
        # Of the models the policy is meant, which every run has.
        ends = [name for name in ends if name not in self.inherited and not name.startswith(_OTHER_MODELS)] or ends
        below = [name for name in known if section and name.startswith(f"{section}.") and name.endswith(f".{last}")]
        usual = [name for name in below if name in (f"{section}.optim.{last}", f"{section}.megatron.{last}")]
        for names in (ends, usual, below if "_" in last else []):
            # A name of one word may be that of any section.
            if len(names) == 1 and ("_" in key or "." in key or names[0].split(".")[-2] in _USUAL_SECTIONS):
                return names[0]
        neighbours = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
        longer = [name for name in neighbours if "_" in last and name.startswith(f"{last}_")]
        # One wrong letter of a short word is a quarter of it.
        close = difflib.get_close_matches(last, neighbours, n=1, cutoff=0.8 if "_" in last else 0.75)
        close = close or longer
        if close:
            return neighbours[close[0]] if len(close) == 1 else None
        sections = difflib.get_close_matches(section, self.sections, n=1, cutoff=0.9)
        return next((name for each in sections if (name := f"{each}.{last}") in self.leaves), None)

    def unknown(self, key: str, origin: str = "") -> str:
        """The violation of a user who wrote `key`, which does not exist."""
        nearest = self.nearest(key)
        advice = f"did you mean {nearest}?" if nearest else "--help lists them all; leave it out"
        return f"{key}: no such key{origin}; {advice}"
