"""Composes overrides and YAML files into a checked config dataclass, through Hydra; reports all errors together."""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import shlex
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal, overload

from hydra import initialize_config_dir, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, ValueType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from scalerl.config.companions import without_effect
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
from scalerl.config.validate import (
    validate_eval,
    validate_except,
    validate_generation,
    validate_launch,
    validate_ppo,
    validate_sft,
    without_repeats,
)
from scalerl.config.written import quoted, texts_of_yaml

CONFIGS_PACKAGE = "scalerl.configs"
VALIDATORS = {
    "ppo": validate_ppo,
    "sft": validate_sft,
    "generation": validate_generation,
    "eval": validate_eval,
    "launch": validate_launch,
}
# Kind of a configuration -> the command that has it.
COMMANDS = {"ppo": "train", "sft": "sft", "generation": "generate", "eval": "eval", "launch": "launch slurm"}
# Names of verl's primary files.
FILES_OF_VERL = re.compile(
    r"(_generated_)?(ppo|dapo|sft|multiturn_grpo|gsm8k_multiturn\w*)(_megatron|_fsdp|_veomni)?_trainer\w*"
)
_DEFAULTS_OF_VERL = "has verl's defaults; those of scalerl are in `scalerl train --help`"
# `--section.key=value` or `--key=value`, as some launchers write it.
DASHED = re.compile(r"--(?!config_)\w+(\.\w+)*=")
UNREADABLE = (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError)

# The name that a defaults list begins with. It is empty: values are checked against the schema by PartialConfig, and
# Hydra, which only says here which files there are, would copy hundreds of keys for each of them.
for _kind in SCHEMAS:
    ConfigStore.instance().store(name=f"{_kind}_schema", node={})


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
        overrides: a command line: `key=value`, `+group=option`, `--config-dir DIR`, `--config-name NAME`. NAME is a
            YAML file in DIR; it needs no defaults list, and its own groups in DIR are found too.
        rules: False for a caller who validates the configuration later, together with the files and models that it
            names: broken rules between keys are then no error here, unless something else is wrong.
    Raises: ConfigError with every unknown key, wrong type, missing value, unknown name and broken rule. A rule is left
        for the next try when it reads a key that has a value of a wrong type or is misspelt, or when a file or an
        option of a group is wrong, since it would judge the wrong values.
    """
    return composed(kind, overrides, rules=rules).config


@dataclass(frozen=True)
class Composed:
    """A configuration, and what became of the keys of verl among the overrides.

    set_keys: keys that the overrides, groups or files give a value; the others have their default.
    lines: a line for each default that follows from other keys, and for values without effect (`config.companions`).
    """

    config: Any
    translations: list[Translation]
    set_keys: frozenset[str]
    lines: tuple[str, ...] = ()


def composed(kind: str, overrides: Sequence[str], *, rules: bool = True) -> Composed:
    """Composes and checks a configuration as `compose` does, and also returns what became of verl's keys."""
    request = _parse(kind, overrides)
    return _checked(request, _group_overrides(request), rules)


@dataclass(frozen=True)
class Examined:
    """What a run would make of each argument of a command line.

    taken: arguments that stay as they are.  translations: what became of verl's keys.  violations: all that is wrong,
    except broken rules between keys and missing values.  config: the configuration, with defaults in place of wrong
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
    request = _parse(kind, overrides, with_files=False)
    partial = PartialConfig(SCHEMAS[kind], kind, left_open)
    taken = []
    for override in request.values:
        before = len(partial.violations)
        partial.put_override(override)
        if len(partial.violations) == before:
            taken.append(override)
    _, config = partial.finish()
    translated = {translation.key for translation in partial.translations}
    return Examined(
        [str(override.input_line).lstrip("+") for override in taken if override.key_or_group not in translated],
        [*request.translations, *partial.translations],
        [*request.violations, *(text for text in partial.violations if text.split(" = ")[0] not in translated)],
        config,
    )


def refusals(kind: str, overrides: Sequence[str], left_open: Iterable[str]) -> list[str]:
    """Lists what a run would refuse of a command line, without the config groups and files that it names.

    left_open: keys whose value is not known; what names one of them is left out.
    """
    request = _parse(kind, overrides)
    partial = PartialConfig(SCHEMAS[kind], kind)
    for override in request.values:
        partial.put_override(override)
    missing, config = partial.finish()
    violations = [*request.violations, *partial.violations, *missing, *VALIDATORS[kind](config)]
    names = [re.compile(rf"(?<![\w.]){re.escape(key)}(?![\w.])") for key in left_open]
    return [text for text in dict.fromkeys(violations) if not any(name.search(text) for name in names)]


def _checked(request: _Request, groups: list[str], with_rules: bool) -> Composed:
    partial = PartialConfig(SCHEMAS[request.kind], request.kind)
    for origin, package, content, texts in _files(request, groups):
        partial.put_tree(package, content, texts, f" in {origin}")
    for override in request.values:
        partial.put_override(override)
    for key in request.rejected:
        partial.doubt(key)
    missing, config = partial.finish()
    if request.unread:
        missing = []
    wrong_inputs = request.violations + partial.violations
    values = without_repeats(config, dict(domain_violations(config)))
    if with_rules or wrong_inputs or missing or values:
        # A run would do without what is refused of verl's keys, so that the others mean what they will mean then.
        own = validate_except(config, partial.is_doubtful) if partial.doubtful else VALIDATORS[request.kind](config)
        if violations := [*wrong_inputs, *missing, *own]:
            error = ConfigError(violations)
            error.config = config
            raise error
    lines = (*partial.followed, *without_effect(config, partial.set_keys))
    return Composed(config, [*request.translations, *partial.translations], partial.set_keys, lines)


@dataclass
class _Request:
    """A parsed command line, with a violation for each argument that could not be parsed.

    rejected: keys whose value is unknown by that; "" stands for all keys.
    unread: whether a file of the user's is not read, so that no key can be said to be missing.
    """

    kind: str
    config_name: str
    config_dir: Path | None
    groups: list[Override] = field(default_factory=list)
    values: list[Override] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    rejected: set[str] = field(default_factory=set)
    translations: list[Translation] = field(default_factory=list)
    unread: bool = False

    def without_file(self, violation: str) -> None:
        """Adds the violation of a file that is not read; whatever it sets is unknown."""
        self.violations.append(violation)
        self.rejected.add("")
        self.unread = True


def _without_files_of_verl(flags: argparse.Namespace) -> list[Translation]:
    """Corrects the flags of config files in place, and returns the translation of each flag that is left out.

    --config-path is another name of --config-dir where it is a directory with that file. The names of verl's own files
    stand for its defaults, and are left out.
    """
    name, path = flags.config_name, flags.config_path
    if path is not None and flags.config_dir is None and (Path(path) / f"{_stem(name or '')}.yaml").is_file():
        flags.config_dir, flags.config_path = path, None
    if name is None or flags.config_dir is not None or not FILES_OF_VERL.fullmatch(_stem(name)):
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
        f"{' '.join(written)}: what this file sets is not read here; add its keys, or the file itself: --config-dir "
        "DIR --config-name NAME"
    ]


def _stem(name: str) -> str:
    return name.removesuffix(".yaml")


def _parse(kind: str, arguments: Sequence[str], *, with_files: bool = True) -> _Request:
    """Parses a command line.  with_files: False: the files that it names are a violation instead of being looked up."""
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
    request = _Request(kind, kind, None, violations=unread, translations=translations)
    if with_files:
        rest = _find_files(request, flags, rest)
    if hidden := _hidden_files(request):
        request.violations += hidden
        request.rejected.add("")
    group_names = _group_names(request)
    for text in rest:
        _parse_override(request, group_names, text)
    return request


def _find_files(request: _Request, flags: argparse.Namespace, arguments: list[str]) -> list[str]:
    """Finds the directory and the primary file that the flags name; returns the arguments that name no file.

    A file that is not found is a violation, and the command's own is in its place, so that the rest is checked too.
    """
    written = {text: Path(text) for text in (*arguments, flags.config_dir or "") if _is_config_file(text)}
    for path in written.values():
        request.without_file(f"{path}: write --config-dir {path.parent} --config-name {path.stem} for this file")
    if flags.config_path is not None:
        if not Path(flags.config_path).is_dir():
            why = f"no such directory (looked in {Path.cwd()})"
        else:
            why = f"there is no {_stem(flags.config_name or request.kind)}.yaml in it"
        request.without_file(
            f"--config-path {flags.config_path}: {why}; write --config-dir DIR --config-name NAME for DIR/NAME.yaml"
        )
    elif flags.config_dir is not None and flags.config_dir not in written:
        if Path(flags.config_dir).is_dir():
            request.config_dir = Path(flags.config_dir).absolute()
        else:
            request.without_file(f"--config-dir {flags.config_dir}: no such directory (looked in {Path.cwd()})")
    name = _stem(flags.config_name or request.kind)
    if any(root.joinpath(f"{name}.yaml").is_file() for root in _roots(request)):
        request.config_name = name
    elif not request.unread:
        names = sorted({path.stem for root in _roots(request) for path in _yaml_files(root)})
        request.without_file(f"--config-name {name}: no such file; there are {', '.join(names)}")
    following = [*arguments, ""][1:]
    return [
        text
        for text, after in zip(arguments, following, strict=True)
        # An option of another program's for a file, --config FILE, goes with it.
        if text not in written and not (text.startswith("--") and after in written)
    ]


def _is_config_file(text: str) -> bool:
    return "=" not in text and text.endswith(".yaml") and Path(text).is_file()


def _parse_override(request: _Request, group_names: set[str], text: str) -> None:
    if DASHED.match(text):
        text = text.lstrip("-")
    named = text.partition("=")[0].lstrip("-+~")
    if text.startswith("--") or ("=" not in text and not text.startswith("~")):
        request.rejected.add(named)
        request.violations.append(f"{text}: not understood; write key=value, --config-dir DIR or --config-name NAME")
        return
    try:
        override = OverridesParser.create().parse_overrides([text])[0]
    except HydraException as error:
        request.rejected.add(named)
        request.violations.append(f"{text}: {_unreadable(text, str(error))}")
        return
    if override.value_type not in (ValueType.ELEMENT, None):
        key, _, value = text.partition("=")
        request.rejected.add(named)
        request.violations.append(f"{text}: one run takes one value; for a list write '{key}=[{value}]'")
    elif override.key_or_group in group_names:
        request.groups.append(override)
    else:
        request.values.append(override)


def _unreadable(text: str, error: str) -> str:
    """Why the parser of overrides cannot read an argument, and how to write it.  error: what the parser says."""
    key, _, value = text.partition("=")
    if placeholder := re.search(r"<[^<>]*>|‹[^‹›]*›", value):
        return f"{placeholder[0]} stands for a value of yours; write it there"
    reason = error.split("\nSee ")[0]
    if reason.startswith("LexerNoViableAltException"):
        reason = "the value has a character that must be quoted"
    written = shlex.quote(f"{key}={quoted(value, Quote.double)}")
    return f"{reason}; quote a value with special characters: {written}"


# Files and groups


def _roots(request: _Request) -> list[Any]:
    """The directories where config files are looked up, in order. Hydra finds the primary config in the first alone."""
    package = resources.files(CONFIGS_PACKAGE)
    if request.config_dir is None:
        return [package]
    return [request.config_dir, package] if _primary_is_users(request) else [package, request.config_dir]


def _primary_is_users(request: _Request) -> bool:
    return request.config_dir is not None and (request.config_dir / f"{request.config_name}.yaml").is_file()


def _yaml_files(root: Any) -> Iterator[Path]:
    return (Path(str(entry)) for entry in root.iterdir() if entry.name.endswith(".yaml"))


def _group_names(request: _Request) -> set[str]:
    return {
        entry.name for root in _roots(request) for entry in root.iterdir() if entry.is_dir() and any(_yaml_files(entry))
    }


def _hidden_files(request: _Request) -> list[str]:
    """A violation for each group file of the user's that the package's file of the same name would hide."""
    first, *others = _roots(request)
    if not others or _primary_is_users(request):
        return []
    own = sorted(path.relative_to(others[0]) for path in others[0].glob("*/*.yaml"))
    return [
        f"{others[0] / path}: scalerl has a {path} too; give yours another name"
        for path in own
        if first.joinpath(str(path)).is_file()
    ]


def _options(request: _Request, group: str) -> list[str]:
    folders = (root.joinpath(group) for root in _roots(request))
    return sorted({path.stem for folder in folders if folder.is_dir() for path in _yaml_files(folder)})


_HYDRA_IN_USE = threading.Lock()


@contextmanager
def _hydra(request: _Request) -> Iterator[None]:
    """Sets Hydra's search path and puts its global state back at the end.

    Threads take turns: Hydra's state is the process's.
    """
    if _primary_is_users(request):
        session = functools.partial(initialize_config_dir, str(request.config_dir))
    else:
        session = functools.partial(initialize_config_module, CONFIGS_PACKAGE)
    with _HYDRA_IN_USE, session(version_base="1.3"):
        yield


def _search_path(request: _Request) -> list[str]:
    """The override that tells Hydra the second of `_roots`; no override if there is only one root."""
    if request.config_dir is None:
        return []
    second = f"pkg://{CONFIGS_PACKAGE}" if _primary_is_users(request) else f"file://{request.config_dir}"
    return [f"hydra.searchpath=[{quoted(second)}]"]


def _group_overrides(request: _Request) -> list[str]:
    """The overrides of groups as Hydra wants them: `+` exactly where the defaults list does not name the group yet."""
    if not request.groups:
        return []
    chosen = _defaults(request, []).choices
    texts = []
    for override in request.groups:
        group, value = override.key_or_group, override.value()
        unknown = _unknown_options(request, group, value) or _options_of_others(request, group, value)
        if unknown:
            request.violations += unknown
            request.rejected.add("")
        else:
            text = (override.input_line or "").lstrip("+")
            texts.append(text if override.is_delete() or group in chosen else "+" + text)
    return texts


def _unknown_options(request: _Request, group: str, value: Any) -> list[str]:
    options = _options(request, group)
    wanted = [name for name in (value if isinstance(value, list) else [value]) if name is not None]
    violations = []
    for name in (str(name) for name in wanted if str(name) not in options):
        close = difflib.get_close_matches(name, options, n=1)
        guess = f"did you mean {group}={close[0]}? There" if close else "there"
        violations.append(f"{group}={name}: no such option; {guess} are {', '.join(options)}")
    return violations


def _options_of_others(request: _Request, group: str, value: Any) -> list[str]:
    """A violation for each option of scalerl's own whose keys are those of another command."""
    wanted = [str(name) for name in (value if isinstance(value, list) else [value]) if name is not None]
    kinds = _kinds_of_options(group)
    fitting = sorted(name for name, of_name in kinds.items() if request.kind in of_name)
    there = f"this one has {', '.join(fitting)}" if fitting else f"this one has no {group}"
    return [
        f"{group}={name}: is for `scalerl {COMMANDS[kinds[name][0]]}`; {there}"
        for name in wanted
        if kinds.get(name) and request.kind not in kinds[name]
    ]


@functools.cache
def _kinds_of_options(group: str) -> dict[str, list[str]]:
    """Option of scalerl's own -> the kinds of configurations that have its keys."""
    folder = resources.files(CONFIGS_PACKAGE).joinpath(group)
    sections = {kind: {section.name for section in fields(schema)} for kind, schema in SCHEMAS.items()}
    return {
        path.stem: [kind for kind, names in sections.items() if _top_level_keys(path) <= names]
        for path in (_yaml_files(folder) if folder.is_dir() else ())
    }


def _top_level_keys(path: Path) -> set[str]:
    content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return {str(key) for key in content} - {"defaults"} if isinstance(content, dict) else set()


@dataclass(frozen=True)
class _Defaults:
    """What Hydra makes of a defaults list.  choices: the groups in it.  files: (path below its root, package)."""

    choices: frozenset[str]
    files: tuple[tuple[str, str], ...]


def _defaults(request: _Request, groups: Sequence[str]) -> _Defaults:
    """What Hydra makes of the files and groups of a request; nothing where a file cannot be read."""
    try:
        if request.config_dir is None:
            return _defaults_in_package(request.config_name, tuple(groups))
        return _computed_defaults(request, groups)
    except UNREADABLE as error:
        if not request.unread:
            request.without_file(f"{request.config_name}: cannot be read: {error}")
        return _Defaults(frozenset(), ())


@functools.lru_cache(maxsize=256)
def _defaults_in_package(config_name: str, groups: tuple[str, ...]) -> _Defaults:
    """Finds the defaults of a configuration without files of the user's: those of the package never change."""
    return _computed_defaults(_Request("", config_name, None), groups)


def _computed_defaults(request: _Request, groups: Sequence[str]) -> _Defaults:
    for path in request.config_dir.glob("*.yaml") if request.config_dir is not None else ():
        for word in set(re.findall(r"\w+", path.read_text(encoding="utf-8"))):
            if FILES_OF_VERL.fullmatch(word):
                # In a defaults list it is an empty file, which a file of the user's with that name goes before.
                ConfigStore.instance().store(name=word, node={})
    with _hydra(request):
        loader = GlobalHydra.instance().config_loader()
        overrides = [*_search_path(request), *groups]
        found = loader.compute_defaults_list(request.config_name, overrides, RunMode.RUN)
    return _Defaults(
        frozenset(found.overrides.known_choices),
        tuple((f"{default.config_path}.yaml", default.package or "") for default in found.defaults),
    )


def _files(request: _Request, groups: Sequence[str]) -> Iterator[tuple[str, str, Any, Any]]:
    """Yields (file, package, content, texts) of every YAML file of the composition, in the order in which they apply.

    texts: the content with numbers and booleans as they were written.
    """
    for path, package in _defaults(request, groups).files:
        source = next((root.joinpath(path) for root in _roots(request) if root.joinpath(path).is_file()), None)
        if source is None:  # Hydra's own configs, the schema and verl's files
            if FILES_OF_VERL.fullmatch(_stem(path)):
                request.translations.append(Translation("defaults", _stem(path), "already so", why=_DEFAULTS_OF_VERL))
            continue
        text = source.read_text(encoding="utf-8")
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        if isinstance(content, dict):
            texts = texts_of_yaml(text)
            texts = texts if isinstance(texts, dict) else content
            content, texts = ({k: v for k, v in tree.items() if k != "defaults"} for tree in (content, texts))
            yield str(source), package, content, texts
