"""The dotted keys that exist with their types, and the known key that a misspelt one was meant to be."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import pickle
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from scalerl.config.schema.fields import domains_of
from scalerl.config.suggestions import is_misspelt

KeyKind = Literal["leaf", "section", "free", "unknown"]
# Sections of models that a run may do without.
_OTHER_MODELS = ("critic.", "reward_model.")


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
        domain = domains_of(self.owner).get(self.name)
        return _text_type(self.annotation) or (domain is not None and domain.is_text)

    @property
    def type_text(self) -> str:
        """The type as a user reads it."""
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


def fresh_defaults(schema: type) -> DictConfig:
    """The same to be changed, in a twentieth of the time of making it; `copy.deepcopy` takes a sixth."""
    return pickle.loads(_pickled_defaults(schema))


@functools.cache
def _pickled_defaults(schema: type) -> bytes:
    return pickle.dumps(defaults_of(schema), pickle.HIGHEST_PROTOCOL)


@functools.cache
def inherited_keys(schema: type) -> dict[str, str]:
    """Maps each key whose default is the value of another key to that other key."""
    raw: Any = OmegaConf.to_container(defaults_of(schema), resolve=False)
    sources = {}
    for leaf in leaves(schema):
        value = functools.reduce(lambda node, part: node[part], leaf.key.split("."), raw)
        if isinstance(value, str) and (match := re.fullmatch(r"\$\{([\w.]+)\}", value)):
            sources[leaf.key] = match[1]
    return sources


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
        """The known key that `key` is a misspelling of: a neighbour in its section whose name is nearly the same.

        A path may lack its start or a section in between, where only one key then ends so. None: nothing is near enough
        to be meant.
        """
        section, _, last = key.rpartition(".")
        known = [*self.leaves, *sorted(self.sections)]
        if whole := [name for name in known if name.endswith("." + key)]:
            # Of the models the policy is meant, which every run has.
            own = [name for name in whole if name not in self.inherited and not name.startswith(_OTHER_MODELS)]
            return _only(own or whole, key)
        below = [name for name in known if section and name.startswith(section + ".") and name.endswith("." + last)]
        if usual := [name for name in below if name in (f"{section}.optim.{last}", f"{section}.megatron.{last}")]:
            return _only(usual, key)
        if below and "_" in last:
            return _only(below, last)
        neighbours = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
        if near := [name for name in neighbours if is_misspelt(last, name)]:
            return neighbours[max(near, key=lambda name: _ratio(name, last))]
        cut = [name for name in neighbours if _lacks_words(last, name)]
        # A name that is part of several is no misspelling of one of them.
        if len(cut) == 1:
            return neighbours[cut[0]]
        return self._misspelt_section(section, last)

    def _misspelt_section(self, section: str, last: str) -> str | None:
        parts = section.split(".")
        alike = [
            name
            for name in sorted(self.sections)
            if section
            and len(known := name.split(".")) == len(parts)
            and all(part == other or is_misspelt(part, other) for part, other in zip(parts, known, strict=True))
        ]
        named = [f"{name}.{last}" for name in alike if f"{name}.{last}" in self.leaves]
        return named[0] if named else None

    def unknown(self, key: str, origin: str = "") -> str:
        """The violation of a user who wrote `key`, which does not exist."""
        nearest = self.nearest(key)
        advice = f"did you mean {nearest}?" if nearest else "--help lists them all; leave it out"
        return f"{key}: no such key{origin}; {advice}"


def _only(names: list[str], end: str) -> str | None:
    """The one name that ends so; None where there are several, or where the end may be that of any section."""
    is_one_word = "_" not in end and "." not in end
    if len(names) != 1 or (is_one_word and names[0].split(".")[-2] not in ("optim", "megatron")):
        return None
    return names[0]


def _lacks_words(written: str, known: str) -> bool:
    """Whether a name of at least two words begins the other, or has all its words but one, in their order."""
    words, meant = written.split("_"), known.split("_")
    if len(words) < 2:
        return False
    others = iter(meant)
    return known.startswith(written + "_") or (len(meant) == len(words) + 1 and all(word in others for word in words))


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()
