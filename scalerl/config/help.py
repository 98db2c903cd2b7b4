"""The reference of keys that `--help` prints: names and defaults from the dataclasses, texts from their comments."""

from __future__ import annotations

import dataclasses
import inspect
import io
import tokenize
from functools import cache
from typing import Any, Literal

from omegaconf import MISSING

from scalerl.config import schema
from scalerl.config.keys import Leaf, inherited_keys, leaves
from scalerl.config.value_checks import show

SCHEMAS: dict[str, type] = {
    "ppo": schema.PPOConfig,
    "sft": schema.SFTConfig,
    "generation": schema.GenerationConfig,
    "eval": schema.EvalConfig,
}
Kind = Literal["ppo", "sft", "generation", "eval"]
# A field without a comment in its class, or in those that this one extends, means what its namesake here means.
LIKE: dict[type, type] = {
    schema.SFTDataConfig: schema.DataConfig,
    schema.SFTTrainerConfig: schema.TrainerConfig,
    schema.ValSamplingConfig: schema.RolloutConfig,
    schema.GenerationDataConfig: schema.DataConfig,
    schema.GenerationRolloutConfig: schema.RolloutConfig,
    schema.GenerationTrainerConfig: schema.TrainerConfig,
    schema.EvalDataConfig: schema.DataConfig,
    schema.EvalRewardConfig: schema.RewardModelConfig,
    schema.EvalTrainerConfig: schema.TrainerConfig,
}


@dataclasses.dataclass(frozen=True)
class KeyDoc:
    """One key; `default` as a user would write it, "required" where there is none."""

    key: str
    type_text: str
    default: str
    comment: str


def key_docs(kind: Kind) -> list[KeyDoc]:
    """Every key, in the order of the source. A field without a comment may have a namesake's."""
    inherited = inherited_keys(SCHEMAS[kind])
    return [
        KeyDoc(leaf.key, leaf.type_text, _inherited(inherited, leaf) or _default(leaf), _comment(leaf))
        for leaf in leaves(SCHEMAS[kind])
    ]


def help_text(kind: Kind) -> str:
    """All keys with default and comment, by section; one line for a section whose keys are all as another section's."""
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
        name = f"  {doc.key} ({doc.type_text}) = {doc.default}"
        lines += [name, f"      {doc.comment}"] if doc.comment else [name]
    return "\n".join(lines)


def _same_sections(kind: str, docs: list[KeyDoc]) -> dict[str, str]:
    """Sections of which each key is inherited from its namesake in another section -> that section."""
    inherited = inherited_keys(SCHEMAS[kind])
    sources: dict[str, set[str]] = {}
    for doc in docs:
        section, _, name = doc.key.rpartition(".")
        source, _, source_name = inherited.get(doc.key, "").rpartition(".")
        sources.setdefault(section, set()).add(source if source_name == name else "")
    return {section: found.pop() for section, found in sources.items() if len(found) == 1 and "" not in found}


def _inherited(inherited: dict[str, str], leaf: Leaf) -> str | None:
    return f"as {inherited[leaf.key]}" if leaf.key in inherited else None


def _default(leaf: Leaf) -> str:
    field = next(f for f in dataclasses.fields(leaf.owner) if f.name == leaf.name)
    value: Any = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return "required" if value == MISSING else show(value)


def _comment(leaf: Leaf) -> str:
    others = LIKE[leaf.owner].__mro__ if leaf.owner in LIKE else ()
    owners = [cls for cls in (*leaf.owner.__mro__, *others) if dataclasses.is_dataclass(cls)]
    return next((found for cls in owners if (found := _comments(cls).get(leaf.name))), "")


@cache
def _comments(cls: type) -> dict[str, str]:
    """Field -> the comment lines right above it, joined."""
    found: dict[str, str] = {}
    pending: list[str] = []
    at_line_start = True
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(cls)).readline):
        if token.type == tokenize.COMMENT:
            pending.append(token.string.lstrip("# "))
        elif token.type in (tokenize.NEWLINE, tokenize.INDENT):
            at_line_start = True
        elif token.type == tokenize.NAME and at_line_start:
            if pending:
                found[token.string] = " ".join(pending)
            pending, at_line_start = [], False
        elif token.type not in (tokenize.NL, tokenize.DEDENT):
            at_line_start = False
    return found
