"""Composes overrides and YAML files into a checked config dataclass, through Hydra; reports all errors together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from scalerl.config.arguments import Arguments, parse
from scalerl.config.errors import ConfigError
from scalerl.config.foreign_keys import Translation
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
from scalerl.config.validate import violations_of, without_repeats


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
    partial, missing, config = _filled(arguments)
    wrong_inputs = arguments.violations + partial.violations
    missing = [] if arguments.unread else missing
    checked = rules or wrong_inputs or missing or without_repeats(config, dict(domain_violations(config)))
    if checked and (violations := [*wrong_inputs, *missing, *violations_of(config, wrong=partial.wrong)]):
        error = ConfigError(violations)
        error.config = config
        raise error
    translations = [*arguments.translations, *partial.translations]
    lines = config.lines_without_effect(partial.set_keys) if isinstance(config, PPOConfig) else ()
    return Composed(config, translations, partial.set_keys, tuple(lines))


def _filled(arguments: Arguments) -> tuple[PartialConfig, list[str], Any]:
    """The partial configuration, the violations of missing values, and the configuration as a dataclass."""
    partial = PartialConfig(SCHEMAS[arguments.kind], arguments.kind)
    for node in arguments.nodes:
        partial.put_tree(node.package, node.content, node.texts, f" in {node.origin}")
    for override in arguments.values:
        partial.put_override(override)
    for key in arguments.wrong:
        partial.doubt(key)
    return partial, *partial.finish()


@dataclass(frozen=True)
class Examined:
    """What a run would make of each argument of a command line.

    taken: arguments that stay as they are.  translations: what became of verl's keys.  violations: all that is wrong,
    except broken checks between keys and missing values.  config: the configuration, with defaults in place of wrong
    values.
    """

    taken: list[str]
    translations: list[Translation]
    violations: list[str]
    config: Any


def examined(kind: str, overrides: Sequence[str], left_open: Mapping[str, str]) -> Examined:
    """Examines each argument of a command line as a run would, without the config groups and files that it names.

    left_open: key -> text that a shell replaces by its value; such keys are not among the overrides.
    """
    arguments = parse(kind, overrides, with_files=False)
    partial = PartialConfig(SCHEMAS[kind], kind, left_open)
    taken = []
    for override in arguments.values:
        before = len(partial.violations)
        partial.put_override(override)
        if len(partial.violations) == before:
            taken.append(override)
    _, config = partial.finish()
    translated = {translation.key for translation in partial.translations}
    return Examined(
        [str(override.input_line).lstrip("+") for override in taken if override.key_or_group not in translated],
        [*arguments.translations, *partial.translations],
        [*arguments.violations, *(text for text in partial.violations if text.split(" = ")[0] not in translated)],
        config,
    )


def refusals(kind: str, overrides: Sequence[str], left_open: Iterable[str]) -> list[str]:
    """Lists what a run would refuse of a command line.

    left_open: keys whose value is not known; a violation that names one of them is left out.
    """
    arguments = parse(kind, overrides)
    partial, missing, config = _filled(arguments)
    violations = [*arguments.violations, *partial.violations, *missing, *violations_of(config)]
    names = [re.compile(rf"(?<![\w.]){re.escape(key)}(?![\w.])") for key in left_open]
    return [text for text in dict.fromkeys(violations) if not any(name.search(text) for name in names)]
