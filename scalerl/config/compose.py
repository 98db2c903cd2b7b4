"""Composes overrides and YAML files into a config dataclass, through Hydra, and checks it; all errors come together."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from scalerl.config.arguments import parse
from scalerl.config.errors import ConfigError
from scalerl.config.foreign_keys import Translation
from scalerl.config.keys import default_sources, inherited_keys
from scalerl.config.partial_config import PartialConfig
from scalerl.config.schema import (
    SCHEMAS,
    EvalConfig,
    GenerationConfig,
    Kind,
    LaunchConfig,
    PPOConfig,
    SFTConfig,
    domain_violations,
)
from scalerl.config.schema.fields import Place, broken_checks


@overload
def compose(kind: Literal["ppo"], overrides: Sequence[str], *, rules: bool = True) -> PPOConfig: ...
@overload
def compose(kind: Literal["sft"], overrides: Sequence[str], *, rules: bool = True) -> SFTConfig: ...
@overload
def compose(kind: Literal["generation"], overrides: Sequence[str]) -> GenerationConfig: ...
@overload
def compose(kind: Literal["eval"], overrides: Sequence[str]) -> EvalConfig: ...
@overload
def compose(kind: Literal["launch"], overrides: Sequence[str]) -> LaunchConfig: ...
def compose(
    kind: Kind, overrides: Sequence[str], *, rules: bool = True
) -> PPOConfig | SFTConfig | GenerationConfig | EvalConfig | LaunchConfig:
    """Composes and checks a configuration. Interpolations are resolved; relative paths stay as they are.

    Args:
        overrides: a command line: `key=value`, `group=option`, `--config-dir DIR`, `--config-name NAME`. NAME is a YAML
            file in DIR; it needs no defaults list, and its own groups in DIR are found too.
        rules: False for a caller who validates the configuration later, together with the files and models that it
            names: broken checks between keys are then no error here, unless something else is wrong.
    Raises: ConfigError with every unknown key, wrong type, missing value, unknown name and broken check. A check is
        left for the next try where one of its keys has a wrong type or is misspelt, or where a file or an option of a
        group is wrong, since it would judge other values than the user meant.
    """
    return composed(kind, overrides, rules=rules).config


@dataclass(frozen=True)
class Composed:
    """A configuration, and what became of the keys of verl among the overrides.

    set_keys: keys that the overrides, groups or files give a value; the others have their default.
    lines: a line for each value without effect, which the user set.
    """

    config: Any
    translations: list[Translation]
    set_keys: frozenset[str]
    lines: tuple[str, ...] = ()


def composed(kind: str, overrides: Sequence[str], *, rules: bool = True) -> Composed:
    """Composes and checks a configuration as `compose` does, and also returns what became of verl's keys."""
    arguments = parse(kind, overrides)
    partial = PartialConfig(SCHEMAS[kind], kind)
    for node in arguments.nodes:
        partial.put_tree(node.package, node.content, node.texts, f" in {node.origin}")
    for override in arguments.values:
        partial.put_override(override)
    for key in arguments.wrong:
        partial.doubt(key)
    missing, config = partial.finish()
    wrong_inputs = [*arguments.violations, *partial.violations, *([] if arguments.unread else missing)]
    checked = rules or wrong_inputs or any(domain_violations(config))
    if checked and (violations := [*wrong_inputs, *violations_of(config, wrong=partial.wrong)]):
        error = ConfigError(violations)
        error.config = config
        raise error
    translations = [*arguments.translations, *partial.translations]
    lines = config.lines_without_effect(partial.set_keys) if isinstance(config, PPOConfig) else ()
    return Composed(config, translations, partial.set_keys, tuple(lines))


def violations_of(cfg: Any, *, device: str | None = None, wrong: Iterable[str] = ()) -> list[str]:
    """Lists everything that is wrong with the configuration of a command by itself.

    Args:
        device: cuda or cpu once it is known; None takes trainer.device, where auto skips the checks of one device.
        wrong: keys and sections that have a violation already; "" stands for all keys. A check between such a key and
            others is left out.
    Returns: "key = value: limit; what to set" for each violation; empty when there is none.
    """
    outside = dict(domain_violations(cfg))
    is_here = device is not None
    if device is None and isinstance(cfg, PPOConfig | SFTConfig) and cfg.trainer.device in ("cuda", "cpu"):
        device = cfg.trainer.device
    at = Place("", device, is_here, _with_followers(type(cfg), {*wrong, *outside}))
    without = cfg.sections_without_checks() if isinstance(cfg, PPOConfig) else ()
    broken = (text for text in broken_checks(cfg, at, without) if text.split(" = ")[0] not in outside)
    return [*_without_repeats(cfg, outside), *broken]


def _with_followers(schema: type, wrong: set[str]) -> frozenset[str]:
    """Adds the keys whose default follows from a wrong key."""
    followers = default_sources(schema)
    while new := {key for key, sources in followers.items() if key not in wrong and not wrong.isdisjoint(sources)}:
        wrong |= new
    return frozenset(wrong)


def _without_repeats(cfg: Any, outside: dict[str, str]) -> list[str]:
    """The violations, without those of keys that inherit their value from another key with a violation."""
    sources = inherited_keys(type(cfg))

    def repeats(key: str) -> bool:
        return sources.get(key) in outside and value_at(cfg, key) == value_at(cfg, sources[key])

    return [text for key, text in outside.items() if not repeats(key)]


def value_at(cfg: Any, key: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(getattr, key.split("."), cfg)
