"""Parses a command line of keys: flags of files, `group=option`, `key=value`; all errors are kept."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from scalerl.config.config_files import FILES_OF_VERL, ConfigFiles, ConfigNode
from scalerl.config.errors import ConfigError
from scalerl.config.foreign_keys import Translation
from scalerl.config.written import quoted

_DEFAULTS_OF_VERL = "has verl's defaults; those of scalerl are in `scalerl train --help`"
# `--section.key=value` or `--key=value`, as some launchers write it.
_DASHED = re.compile(r"--(?!config_)\w+(\.\w+)*=")
Read = TypeVar("Read")


@dataclass
class Arguments:
    """A parsed command line, with a violation for each argument that could not be parsed.

    files: the nodes that it may name.  nodes: those of the composition.
    wrong: keys whose value is unknown by a violation; "" stands for all keys.
    unread: whether a file of the user's is not read, so that no key can be said to be missing.
    """

    kind: str
    files: ConfigFiles
    nodes: list[ConfigNode] = field(default_factory=list)
    values: list[Override] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)
    translations: list[Translation] = field(default_factory=list)
    unread: bool = False

    def without_file(self, violation: str) -> None:
        """Adds the violation of a file that is not read; whatever it sets is unknown."""
        self.violations.append(violation)
        self.wrong.add("")
        self.unread = True


def parse(kind: str, arguments: Sequence[str], *, with_files: bool = True) -> Arguments:
    """Parses a command line.  with_files: False: the files that it names are a violation instead of being read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-path", "-cp")
    try:
        flags, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError([f"{error}; write --config-dir DIR --config-name NAME"]) from None
    translations = _without_files_of_verl(flags)
    unread = [] if with_files else _unread_files(flags)
    directory = flags.config_dir or flags.config_path
    path = Path(directory).absolute() if directory is not None and Path(directory).is_dir() else None
    files = ConfigFiles.of_package(kind) if path is None else ConfigFiles(kind, path)
    parsed = Arguments(kind, files, violations=unread, translations=translations)
    if directory is not None and path is None:
        flag = "--config-dir" if flags.config_dir else "--config-path"
        parsed.without_file(
            f"{flag} {directory}: no such directory (looked in {Path.cwd()}); write --config-dir DIR "
            "--config-name NAME for DIR/NAME.yaml"
        )
    name = _primary_file(parsed, _stem(flags.config_name or kind))
    groups = _overrides(parsed, rest)
    _read(parsed, name, groups)
    return parsed


def _stem(name: str) -> str:
    return name.removesuffix(".yaml")


def _without_files_of_verl(flags: argparse.Namespace) -> list[Translation]:
    """Takes the flags of verl's own files away, which stand for its defaults, and returns their translations."""
    name, path = flags.config_name, flags.config_path
    if name is None or flags.config_dir is not None or not FILES_OF_VERL.fullmatch(_stem(name)):
        return []
    if path is not None and (Path(path) / f"{_stem(name)}.yaml").is_file():
        return []
    flags.config_name = flags.config_path = None
    written = {"--config-name": name} | ({} if path is None else {"--config-path": path})
    return [Translation(flag, value, "already so", why=_DEFAULTS_OF_VERL) for flag, value in written.items()]


def _unread_files(flags: argparse.Namespace) -> list[str]:
    """Takes the flags of config files away, and returns their violation for a caller who reads no files."""
    names = ("config_path", "config_dir", "config_name")
    written = [f"--{name.replace('_', '-')} {value}" for name in names if (value := getattr(flags, name)) is not None]
    flags.config_path = flags.config_dir = flags.config_name = None
    if not written:
        return []
    return [
        f"{' '.join(written)}: the keys of this file are not read here; add them, or the file itself: --config-dir DIR "
        "--config-name NAME"
    ]


def _primary_file(parsed: Arguments, name: str) -> str:
    """The name of the primary file; the command's own where there is none of this name, so that the rest is checked."""
    names = parsed.files.names()
    if name in names:
        return name
    if not parsed.unread:
        parsed.without_file(f"--config-name {name}: no such file; there are {', '.join(names)}")
    return parsed.kind


def _overrides(parsed: Arguments, arguments: Sequence[str]) -> list[Override]:
    """Parses the overrides of values into `parsed`; returns those of groups."""
    groups, group_names = [], parsed.files.groups()
    for text in arguments:
        if (override := _override(parsed, text)) is not None:
            (groups if override.key_or_group in group_names else parsed.values).append(override)
    return groups


def _override(parsed: Arguments, text: str) -> Override | None:
    if _DASHED.match(text):
        text = text.lstrip("-")
    key = text.partition("=")[0].lstrip("-+~")
    if text.startswith("-") or ("=" not in text and not text.startswith("~")):
        violation = "not understood; write key=value, or --config-dir DIR --config-name NAME for DIR/NAME.yaml"
    else:
        try:
            override = OverridesParser.create().parse_overrides([text])[0]
        except HydraException as error:
            violation = _unreadable(text, str(error))
        else:
            if not override.is_sweep_override():
                return override
            written, _, value = text.partition("=")
            violation = f"one run takes one value; for a list write '{written}=[{value}]', for a run of each --multirun"
    parsed.wrong.add(key)
    parsed.violations.append(f"{text}: {violation}")
    return None


def _unreadable(text: str, error: str) -> str:
    """Why the parser of overrides cannot read an argument, and how to write it.  error: the parser's text."""
    key, _, value = text.partition("=")
    if placeholder := re.search(r"<[^<>]*>|‹[^‹›]*›", value):
        return f"{placeholder[0]} stands for a value of yours; write it there"
    reason = error.split("\nSee ")[0]
    if reason.startswith("LexerNoViableAltException"):
        reason = "the value has a character that must be quoted"
    written = shlex.quote(f"{key}={quoted(value, Quote.double)}")
    return f"{reason}; quote a value with special characters: {written}"


def _read(parsed: Arguments, name: str, groups: Sequence[Override]) -> None:
    """Reads the nodes of the composition into `parsed`."""
    chosen = _attempt(parsed, name, lambda: parsed.files.chosen_groups(name))
    wanted = [override for override in groups if not _unknown_options(parsed, override)]
    if chosen is not None:
        texts = [_for_hydra(override, chosen) for override in wanted]
        parsed.nodes = _attempt(parsed, name, lambda: parsed.files.nodes(name, texts)) or []
    for node in parsed.nodes:
        if FILES_OF_VERL.fullmatch(node.name) and not node.content:
            parsed.translations.append(Translation("defaults", node.name, "already so", why=_DEFAULTS_OF_VERL))


def _attempt(parsed: Arguments, name: str, read: Callable[[], Read]) -> Read | None:
    """Reads files; adds the violation of one that cannot be read, and returns None."""
    try:
        return read()
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        parsed.without_file(f"{name}: cannot be read: {error}")
        return None


def _for_hydra(override: Override, chosen: set[str]) -> str:
    """The override of a group with `+` exactly where the defaults list does not name the group yet."""
    text = (override.input_line or "").lstrip("+")
    return text if override.is_delete() or override.key_or_group in chosen else f"+{text}"


def _unknown_options(parsed: Arguments, override: Override) -> bool:
    """Adds a violation for each option of a group that does not exist; returns whether there was one."""
    group, value = override.key_or_group, override.value()
    options = parsed.files.options(group)
    wanted: list[Any] = [name for name in (value if isinstance(value, list) else [value]) if name is not None]
    unknown = [str(name) for name in wanted if str(name) not in options]
    for name in unknown:
        close = difflib.get_close_matches(name, options, n=1)
        guess = f"did you mean {group}={close[0]}? There" if close else "there"
        parsed.wrong.add("")
        parsed.violations.append(f"{group}={name}: no such option; {guess} are {', '.join(options)}")
    return bool(unknown)
