"""The command `scalerl data NAME ... --out DIR`: writes train.parquet and val.parquet of a known data set.

The rows come from the data set's original files, or are generated from a task.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.commands.data import own_rows, reasoning_gym_rows
from scalerl.commands.data.hub_sets import HubSet
from scalerl.commands.data.own_rows import OwnColumns, as_conversations, read_own
from scalerl.commands.data.rows import SOURCES, DataSource
from scalerl.commands.data.splits import TRAIN, VAL, Rows, schema_of, split_of, split_rows, write_all
from scalerl.config.schema import DataConfig
from scalerl.data.files import SUFFIXES, DataFile, lone_surrogate, read_chunks, resolve_files
from scalerl.data.local_copy import is_remote
from scalerl.data.problems import DataError, FileProblems, shown_rows
from scalerl.data.unknown_text import unknown_in_messages
from scalerl.errors import CommandParser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def main(argv: list[str] | None = None) -> int:
    """Runs the command.  Raises DataError for files that cannot be used."""
    arguments = build_parser().parse_args(argv)
    for option in ("prompt", "answer", "template", "system", "data_source", "instruction"):
        if (half := lone_surrogate(getattr(arguments, option, None))) is not None:
            raise DataError([f"--{option.replace('_', '-')}: holds {half}, which is no character; write it as UTF-8"])
    tokenizer = _tokenizer(arguments.model)
    makers = {own_rows.NAME: _own, reasoning_gym_rows.NAME: _generate}
    tables, dropped = makers.get(arguments.name, _convert)(arguments)
    _report(tables, dropped, write_all(tables, arguments.out, overwrite=arguments.overwrite))
    _report_unknown(tables, tokenizer)
    return 0


def _tokenizer(model: str | None) -> PreTrainedTokenizerBase | None:
    if model is None:
        return None
    from scalerl.data.chat import load_tokenizer
    from scalerl.data.model_source import model_directory

    return load_tokenizer(model_directory(model, "--model"))


def _report_unknown(tables: dict[str, Rows], tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Prints what of the messages the tokenizer has no token for."""
    if tokenizer is None:
        return
    for name, rows in tables.items():
        if (unknown := unknown_in_messages(tokenizer, [row.get("messages") or row["prompt"] for row in rows])).rows:
            command = "sft" if "messages" in rows[0] else "train"
            print(f"{name}: {shown_rows(unknown.rows)}: {unknown}; scalerl {command} refuses them")


def _convert(arguments: argparse.Namespace) -> tuple[dict[str, Rows], dict[str, int]]:
    source = SOURCES[arguments.name]
    files = _files(arguments, SUFFIXES)
    read: dict[str, Rows] = {TRAIN: [], VAL: []}
    for file, split in files:
        rows = _read(file, source, arguments.instruction)
        read[split] += rows
        if len(files) <= _MAX_FILES_SHOWN:
            print(f"{file.name}: {len(rows)} rows of {split}")
    print(f"{len(files)} files: {len(read[TRAIN])} rows of {TRAIN}, {len(read[VAL])} of {VAL}")
    split = split_rows(read[TRAIN], read[VAL], arguments.val_size, arguments.seed)
    return split.tables, split.dropped


def _own(arguments: argparse.Namespace) -> tuple[dict[str, Rows], dict[str, int]]:
    if (arguments.prompt is None) == (arguments.template is None):
        raise DataError(["give one of --prompt COLUMN and --template TEXT"])
    columns = OwnColumns(
        arguments.prompt, arguments.answer, arguments.template, arguments.system, arguments.data_source, arguments.sft
    )
    files = _files(arguments, own_rows.OWN_SUFFIXES)
    read: dict[str, Rows] = {TRAIN: [], VAL: []}
    for file, name in files:
        rows = read_own(file.path, file.name, columns)
        read[name] += rows
        print(f"{file.name}: {len(rows)} rows of {name}")
    split = split_rows(read[TRAIN], read[VAL], arguments.val_size, arguments.seed)
    if columns.is_sft:
        return {name: as_conversations(rows) for name, rows in split.tables.items()}, split.dropped
    return split.tables, split.dropped


def _generate(arguments: argparse.Namespace) -> tuple[dict[str, Rows], dict[str, int]]:
    options = reasoning_gym_rows.parse_options(arguments.option)
    sizes = {TRAIN: arguments.size, VAL: arguments.val_size}
    generated = reasoning_gym_rows.generate(arguments.task, sizes, arguments.seed, options, arguments.instruction)
    for name, size in sizes.items():
        if len(generated.rows[name]) < size:
            print(f"task {arguments.task} gave {len(generated.rows[name])} different rows of {name}, not {size}")
    split = split_rows(generated.rows[TRAIN], generated.rows[VAL], None, arguments.seed)
    return split.tables, generated.dropped | split.dropped


_MAX_FILES_SHOWN = 20


def build_parser() -> argparse.ArgumentParser:
    """The arguments of `scalerl data`."""
    parser = CommandParser(
        prog="scalerl data",
        description="Prepare data for scalerl train or sft: your own files, a known data set, or a generated task.",
    )
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, about, instruction in [
        (own_rows.NAME, own_rows.ABOUT, ""),
        *((source.name, source.about, source.instruction) for source in SOURCES.values()),
    ]:
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument(
            "--local",
            nargs="+",
            required=True,
            metavar="FILE",
            help="original files, folders with them, URLs, or a data set of the Hugging Face hub (ORGANISATION/NAME, "
            "@REVISION); by their names, test and val validate, the others train",
        )
        command.add_argument(
            "--val", nargs="+", default=[], metavar="FILE", help="files that validate, whatever their names"
        )
        command.add_argument(
            "--val-size", type=int, metavar="N", help="without validation files: take N rows out of training"
        )
        command.add_argument("--subset", metavar="NAME", help="of a data set on the hub that has several")
        command.add_argument("--seed", type=int, default=0, help="which rows --val-size takes (default 0)")
        command.add_argument("--cache-dir", default=DataConfig.cache_dir, help="copies of URLs (default %(default)s)")
        _add_common(command, instruction)
        if name == own_rows.NAME:
            _add_own(command)
    _add_reasoning_gym(commands)
    return parser


def _add_own(command: argparse.ArgumentParser) -> None:
    command.add_argument("--prompt", metavar="COLUMN", help="text, or a list of messages {role, content}")
    command.add_argument(
        "--template", metavar="TEXT", help="the prompt as text with columns in braces: 'Translate: {english}'"
    )
    command.add_argument(
        "--answer", metavar="COLUMN", help="what the reward function gets as ground_truth; with --sft what is learned"
    )
    command.add_argument("--system", metavar="TEXT", help="a system message before each prompt")
    command.add_argument(
        "--data-source", default="own", metavar="NAME", help="groups validation metrics (default %(default)s)"
    )
    command.add_argument("--sft", action="store_true", help="write conversations, for scalerl sft")


def _add_reasoning_gym(commands: argparse._SubParsersAction) -> None:
    about = reasoning_gym_rows.ABOUT
    command = commands.add_parser(reasoning_gym_rows.NAME, help=about, description=about)
    command.add_argument("--task", required=True, metavar="TASK", help="chain_sum, for example; another word lists all")
    command.add_argument("--size", type=int, required=True, metavar="N", help="rows of train")
    command.add_argument("--val-size", type=int, default=100, metavar="N", help="rows of val (default %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="the rows follow from it (default 0)")
    command.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of the task (min_terms=2); may be repeated"
    )
    _add_common(command, reasoning_gym_rows.INSTRUCTION)


def _add_common(command: argparse.ArgumentParser, instruction: str) -> None:
    command.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where train.parquet and val.parquet go"
    )
    command.add_argument(
        "--instruction",
        default=instruction,
        help=f"text after each problem (default: {instruction!r})" if instruction else argparse.SUPPRESS,
    )
    command.add_argument("--overwrite", action="store_true", help="replace files that are there")
    command.add_argument(
        "--model", metavar="MODEL", help="the model to train (directory or hub name): counts what its tokenizer lacks"
    )


def _files(arguments: argparse.Namespace, suffixes: Sequence[str]) -> list[tuple[DataFile, str]]:
    """The files of --local and --val, with the split of each; files in folders are sorted by name."""
    files_and_splits: list[tuple[DataFile, str]] = []
    has_hub_set = False
    for argument, paths, split in (("--local", arguments.local, None), ("--val", arguments.val, VAL)):
        local: list[str] = []
        for path in paths:
            if (hub_set := HubSet.parse(path)) is not None:
                has_hub_set = True
                of_set = hub_set.files(argument, arguments.subset, suffixes)
                files_and_splits += [(file, split or split_in_set) for file, split_in_set in of_set]
            else:
                local += _in_folder(path, suffixes)
        resolved = resolve_files(local, arguments.cache_dir, suffixes) if local else []
        files_and_splits += [(file, split or split_of(file.name)) for file in resolved]
    if arguments.subset is not None and not has_hub_set:
        raise DataError([f"--subset {arguments.subset}: is for a data set on the hub (--local ORGANISATION/NAME)"])
    return files_and_splits


def _in_folder(path: str, suffixes: Sequence[str]) -> list[str]:
    """The files in a folder, sorted by name; the path itself where it is none."""
    if is_remote(path) or not Path(path).expanduser().is_dir():
        return [path]
    inside = sorted(str(file) for file in Path(path).expanduser().rglob("*") if file.suffix in suffixes)
    inside = [path for path in inside if Path(path).name not in own_rows.NO_ROWS]
    if not inside:
        raise DataError([f"folder {path} holds no file that ends in {', '.join(suffixes)}; correct the path"])
    return inside


def _read(file: DataFile, source: DataSource, instruction: str) -> Rows:
    problems = FileProblems(file.name)
    rows = []
    for chunk in read_chunks(file.path, source.columns, problems, optional=source.optional):
        for row, record in chunk:
            if record.keys() >= set(source.columns):
                converted = source.convert(row, record, instruction, problems)
                if converted is not None:
                    rows.append(converted)
        if problems.full:
            break
    problems.raise_if_any()
    return rows


def _report(tables: dict[str, Rows], dropped: dict[str, int], paths: dict[str, Path]) -> None:
    for reason, count in dropped.items():
        print(f"dropped {count} rows that {reason}")
    for name, rows in tables.items():
        print(f"wrote {paths[name]}: {len(rows)} rows")
    print("columns:")
    for field in schema_of(tables[TRAIN]):
        print(f"  {field.name}: {field.type}")
    for number, row in enumerate(tables[TRAIN][:2]):
        print(f"row {number}: {json.dumps(row, ensure_ascii=False)}")
    command = "sft" if "messages" in tables[TRAIN][0] else "train"
    print(f"next: scalerl {command} data.train_files={paths[TRAIN]} data.val_files={paths[VAL]} ...")
