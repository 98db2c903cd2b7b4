"""The reference of keys that `--help` prints: names, defaults and domains from the dataclasses, texts from comments."""

from __future__ import annotations

import dataclasses
import inspect
import io
import tokenize
from functools import cache
from typing import Any

from omegaconf import MISSING

from scalerl.config.keys import Leaf, inherited_keys, leaves, raw_defaults
from scalerl.config.schema import SCHEMAS, Kind
from scalerl.config.schema.devices import DEVICES_HERE
from scalerl.config.schema.fields import following_text
from scalerl.config.value_checks import show


@dataclasses.dataclass(frozen=True)
class KeyDoc:
    """A key as `--help` describes it.

    default: as a user would write it, "required" where there is none.  domain: "" where every value of the type is
    allowed.
    """

    key: str
    type_text: str
    domain: str
    default: str
    comment: str


def key_docs(kind: Kind) -> list[KeyDoc]:
    """Describes every key of a command, in the order of the source."""
    defaults = raw_defaults(SCHEMAS[kind])
    return [
        KeyDoc(leaf.key, leaf.type_text, _domain(leaf), _default_text(defaults[leaf.key]), _comment(leaf))
        for leaf in leaves(SCHEMAS[kind])
    ]


def help_text(kind: Kind) -> str:
    """Lists all keys of a command with type, default and comment, by section.

    A section whose keys are all inherited from another section takes one line.
    """
    lines: list[str] = []
    section = None
    docs = key_docs(kind)
    same_sections = _same_sections(kind, docs)
    for doc in docs:
        head = doc.key.rpartition(".")[0]
        if head != section:
            section = head
            lines.append("" if lines else "Keys:")
            if head in same_sections:
                lines.append(f"  {head}.*: the keys of {same_sections[head]}; each = as there")
        if head in same_sections:
            continue
        values = f"{doc.type_text}: {doc.domain}" if doc.domain else doc.type_text
        name = f"  {doc.key} ({values}) = {doc.default}"
        lines += [name, f"      {doc.comment}"] if doc.comment else [name]
    return "\n".join(lines)


def _same_sections(kind: str, docs: list[KeyDoc]) -> dict[str, str]:
    """Maps each section whose keys are all inherited from their namesakes in one other section to that section."""
    inherited = inherited_keys(SCHEMAS[kind])
    sources: dict[str, set[str]] = {}
    for doc in docs:
        section, _, name = doc.key.rpartition(".")
        source, _, source_name = inherited.get(doc.key, "").rpartition(".")
        sources.setdefault(section, set()).add(source if source_name == name else "")
    return {section: origins.pop() for section, origins in sources.items() if len(origins) == 1 and "" not in origins}


def _domain(leaf: Leaf) -> str:
    """The limit of a key's values, without the null that its type names already."""
    return "" if leaf.domain is None else leaf.domain.limit.removeprefix("null or ")


def _default_text(default: Any) -> str:
    if default == DEVICES_HERE:
        return "the machine's"
    if default == MISSING:
        return "required"
    return following_text(default) or show(default)


def _comment(leaf: Leaf) -> str:
    """The comment above a key in its section, or in the nearest section that it extends."""
    sections = [cls for cls in leaf.owner.__mro__ if dataclasses.is_dataclass(cls)]
    return next((comment for cls in sections if (comment := _comments(cls).get(leaf.name))), "")


@cache
def _comments(cls: type) -> dict[str, str]:
    """Maps each field of a section to the comment lines right above it, joined."""
    comments: dict[str, str] = {}
    pending: list[str] = []
    at_line_start = True
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(cls)).readline):
        if token.type == tokenize.COMMENT:
            pending.append(token.string.lstrip("# "))
        elif token.type in (tokenize.NEWLINE, tokenize.INDENT):
            at_line_start = True
        elif token.string == "def" and token.start[1]:
            # The methods of a section come after its fields.
            break
        elif token.type == tokenize.NAME and at_line_start:
            if pending:
                comments[token.string] = " ".join(pending)
            pending, at_line_start = [], False
        elif token.type not in (tokenize.NL, tokenize.DEDENT):
            at_line_start = False
    return comments
