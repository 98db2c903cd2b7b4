"""Translates the arguments of a program of verl to scalerl's, with a row for each that says what became of it."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from scalerl.config import ConfigError, composed
from scalerl.config.arguments import parse
from scalerl.config.compose import value_at
from scalerl.config.foreign_keys import Translation
from scalerl.config.keys import key_table
from scalerl.config.partial_config import PartialConfig
from scalerl.config.schema import SCHEMAS
from scalerl.extras.verl.translate.script import split_commands

Fate = Literal["taken over", "renamed", "already so", "verl's default", "dropped"]
FATES: tuple[Fate, ...] = ("taken over", "renamed", "already so", "verl's default", "dropped")
# Programs of verl by a part of their name -> command of scalerl and its kind of configuration.
PROGRAMS = {
    "main_generation": ("generate", "generation"),
    "main_eval": ("eval", "eval"),
    "sft": ("sft", "sft"),
    "main": ("train", "ppo"),
}
# Keys whose default decides what is trained and is not the same in verl, with verl's default.
DEFAULTS_OF_VERL = {
    "algorithm.adv_estimator": "gae",
    "trainer.total_epochs": "30",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "2",
}
# Options of verl's merger that scalerl's has not -> how many values they take.
_OF_MERGER_ALONE = {
    "--tie-word-embedding": 0,
    "--is-value-model": 0,
    "--trust-remote-code": 0,
    "--use_cpu_initialization": 0,
    "--hf_model_path": 1,
}

# A variable, or a command in `$(...)` or backticks.
_OF_SHELL = re.compile(r"\$[\w(]|`")
# A field of megatron in this section may be a key of the section around it.
_OVERRIDES = "override_transformer_config"


@dataclass(frozen=True)
class Row:
    """What became of one argument.  written: as in the script.  becomes: arguments of scalerl."""

    written: str
    fate: Fate
    becomes: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Report:
    """The translation of one command of verl.

    command: that of scalerl, for example train.  refused: what is wrong with the translated command, as a run says it.
    """

    command: str
    rows: list[Row]
    refused: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> list[str]:
        """The arguments of scalerl, each key once: the last value counts."""
        by_key = {text.partition("=")[0]: text for row in self.rows for text in row.becomes}
        return list(by_key.values())

    def shell(self) -> str:
        """The command as a user types it."""
        return " \\\n    ".join([f"scalerl {self.command}", *map(shell_quoted, self.arguments)])

    def table(self) -> str:
        """All rows as text, in a block for each fate."""
        blocks = []
        for fate in FATES:
            rows = [row for row in self.rows if row.fate == fate]
            if rows:
                blocks.append(
                    "\n".join([f"{fate} ({len(rows)}):", *(f"  {line}" for row in rows for line in _lines(row))])
                )
        if self.refused:
            blocks.append("\n".join(["a run will refuse:", *(f"  {text}" for text in self.refused)]))
        return "\n".join(blocks)


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


def command_of(program: str) -> tuple[str, str] | None:
    """The command of scalerl and the kind of its configuration for a module or file of verl; None if there is none."""
    name = program.rpartition("/")[2].removesuffix(".py")
    return next((command for part, command in PROGRAMS.items() if part in name.rpartition(".")[2]), None)


def merge_command(arguments: list[str]) -> str:
    """The command of scalerl for the arguments of verl's merger, and those that it does without, as text."""
    kept = [text for text in arguments if text != "merge"]
    dropped = []
    for option, num_values in _OF_MERGER_ALONE.items():
        if option in kept:
            place = kept.index(option)
            dropped.append(" ".join(kept[place : place + 1 + num_values]))
            del kept[place : place + 1 + num_values]
    command = " ".join(["scalerl merge", *map(shell_quoted, kept)])
    if not dropped:
        return command
    return f"{command}\n\nalready so ({len(dropped)}):\n" + "\n".join(
        f"  {text}: the checkpoint says it" for text in dropped
    )


def report_on(command: str, kind: str, arguments: list[str], launched: Mapping[str, str] | None = None) -> Report:
    """Reports what becomes of each argument. Values may hold `$NAME` and `$(...)` of a shell.

    launched: arguments of the program's launcher -> what they are here.
    """
    table = key_table(SCHEMAS[kind])
    open_arguments = [
        text for text in arguments if _left_to_the_shell(text) and table.kind(_key(text)) in ("leaf", "free")
    ]
    left_open = {_key(text).replace(f".{_OVERRIDES}.", "."): _value(text) for text in open_arguments}
    result = examined(kind, [_readable(text) for text in arguments if text not in open_arguments], left_open)
    rows = [Row(text, "taken over", (text,)) for text in result.taken]
    rows += [Row(text, "taken over", (text.lstrip("+"),)) for text in open_arguments]
    for translation in result.translations:
        if translation.verdict == "refused":
            rows.append(Row(translation.written, "dropped", translation.becomes, translation.why))
        else:
            rows.append(Row(translation.written, translation.verdict, translation.becomes, translation.why))
    for violation in result.violations:
        written, _, why = violation.partition(": ")
        # What only the shell knows is judged when the command runs.
        if not _left_to_the_shell(written):
            rows.append(Row(written, "dropped", why=why))
    if kind == "ppo":
        rows += _defaults(result, {_key(text) for text in open_arguments})
    given = {_key(text) for row in rows for text in row.becomes}
    for written, text in (launched or {}).items():
        if _key(text) not in given:
            rows.append(Row(written, "renamed", (text,), "of the program's launcher"))
    return _judged(kind, Report(command, rows), result.config)


def _judged(kind: str, report: Report, config: Any) -> Report:
    """Adds to the report what a run would refuse of its command, leaving out values that only a shell knows."""
    known = [text for text in report.arguments if not _left_to_the_shell(text)]
    left_open = {_key(text) for text in report.arguments if _left_to_the_shell(text)}
    # Without it a run takes what its own machine has.
    left_open |= {"trainer.n_gpus_per_node"} - {_key(text) for text in known}
    refused = [*_refusals(kind, known, left_open), *_wrong_fields({_key(text) for text in known}, config)]
    return Report(report.command, report.rows, refused)


def _refusals(kind: str, arguments: list[str], left_open: set[str]) -> list[str]:
    """What a run would refuse, without the violations that name a key whose value is not known."""
    try:
        composed(kind, arguments)
    except ConfigError as error:
        names = [re.compile(rf"(?<![\w.]){re.escape(key)}(?![\w.])") for key in left_open]
        return [text for text in error.violations if not any(name.search(text) for name in names)]
    return []


def _wrong_fields(keys: set[str], config: Any) -> Iterator[str]:
    """What is wrong with the fields of Megatron's own configs that are among the keys."""
    of_megatron = {key: match[1] for key in keys if (match := re.fullmatch(r"(.+)\.override_\w+_config\.\w+", key))}
    if not of_megatron:
        return
    with warnings.catch_warnings():
        # Of kernels that this machine lacks, which is another one than the run's.
        warnings.simplefilter("ignore")
        # Imported here: megatron takes seconds to import.
        from scalerl.parallel.megatron_overrides import override_violations
    for section in sorted(set(of_megatron.values())):
        for text in override_violations(section, value_at(config, section)):
            # A field that is inherited is named where it was written.
            if re.split("[ :=]", text)[0] in of_megatron:
                yield text


def _key(text: str) -> str:
    return text.partition("=")[0].lstrip("+-")


def _value(text: str) -> str:
    return text.partition("=")[2].strip("'\"")


def _left_to_the_shell(text: str) -> bool:
    """Whether an argument's value holds a variable or a command that only the shell knows."""
    return _OF_SHELL.search(text.partition("=")[2]) is not None


def _defaults(result: Examined, more: set[str]) -> Iterator[Row]:
    set_keys = more | {text.partition("=")[0] for text in result.taken}
    set_keys |= {text.partition("=")[0] for row in result.translations for text in row.becomes}
    for key, value in DEFAULTS_OF_VERL.items():
        if key not in set_keys:
            text = f"{key}={value}"
            yield Row(text, "verl's default", (text,), "the script does not set it, and scalerl's default is another")


def _readable(argument: str) -> str:
    """An argument that the parser of overrides can read: quoted where its value holds a command of the shell."""
    key, _, value = argument.partition("=")
    if re.search(r"\$\(|`", value) and value[:1] not in "'\"":
        escaped = value.replace("'", "\\'")
        return f"{key}='{escaped}'"
    return argument


def shell_quoted(text: str) -> str:
    """Quotes an argument for a shell, which still expands what the script left to it."""
    if _OF_SHELL.search(text):
        # Quotes in a command's `$(...)` are that command's own.
        pieces = (
            piece if is_command else re.sub(r'["\\]|\$(?=\{)', r"\\\g<0>", piece)
            for piece, is_command in split_commands(text)
        )
        return f'"{"".join(pieces)}"'
    quoted = shlex.quote(text)
    return f'"{text}"' if quoted != text and not re.search(r'["$`\\!]', text) else quoted


def _lines(row: Row) -> Iterator[str]:
    if row.fate == "taken over":
        yield row.written
    elif row.fate == "renamed":
        yield f"{row.written} -> {' '.join(row.becomes)}{f' ({row.why})' if row.why else ''}"
    else:
        yield f"{row.written}: {row.why}"
