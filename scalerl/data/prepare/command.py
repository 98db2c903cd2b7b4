"""The command `scalerl data NAME ... --out DIR`: writes train.parquet and val.parquet of a known data set.

The rows come from the data set's original files, or are generated from a task.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from scalerl.config.schema import DataConfig
from scalerl.data.files import SUFFIXES, DataFile, read_chunks, resolve_files
from scalerl.data.local_copy import is_remote
from scalerl.data.prepare import reasoning_gym_rows
from scalerl.data.prepare.rows import SOURCES, Source
from scalerl.data.prepare.splits import TRAIN, VAL, Rows, Split, split_of, split_rows
from scalerl.data.prepare.writing import schema_of, write_all
from scalerl.data.problems import DataError, FileProblems


def main(argv: list[str] | None = None) -> int:
    """Runs the command.  Raises DataError for files that cannot be used."""
    arguments = _parser().parse_args(argv)
    split = _generate(arguments) if arguments.name == reasoning_gym_rows.NAME else _convert(arguments)
    _report(split, write_all({TRAIN: split.train, VAL: split.val}, arguments.out, overwrite=arguments.overwrite))
    return 0


def _convert(arguments: argparse.Namespace) -> Split:
    source = SOURCES[arguments.name]
    files = _files(arguments.local, None, arguments.cache_dir) + _files(arguments.val, VAL, arguments.cache_dir)
    read: dict[str, Rows] = {TRAIN: [], VAL: []}
    for file, split in files:
        rows = _read(file, source, arguments.instruction)
        read[split] += rows
        if len(files) <= _MAX_FILES_SHOWN:
            print(f"{file.name}: {len(rows)} rows of {split}")
    print(f"{len(files)} files: {len(read[TRAIN])} rows of {TRAIN}, {len(read[VAL])} of {VAL}")
    return split_rows(read[TRAIN], read[VAL], arguments.val_size, arguments.seed)


def _generate(arguments: argparse.Namespace) -> Split:
    options = reasoning_gym_rows.parse_options(arguments.option)
    sizes = {TRAIN: arguments.size, VAL: arguments.val_size}
    generated = reasoning_gym_rows.generate(arguments.task, sizes, arguments.seed, options, arguments.instruction)
    for name, size in sizes.items():
        if len(generated.rows[name]) < size:
            print(f"task {arguments.task} gave {len(generated.rows[name])} different rows of {name}, not {size}")
    split = split_rows(generated.rows[TRAIN], generated.rows[VAL], None, arguments.seed)
    return Split(split.train, split.val, generated.dropped | split.dropped)


_MAX_FILES_SHOWN = 20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scalerl data",
        description="Prepare a known data set for scalerl train, from its original files or by generating it.",
    )
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for source in SOURCES.values():
        command = commands.add_parser(source.name, help=source.about, description=source.about)
        command.add_argument(
            "--local",
            nargs="+",
            required=True,
            metavar="FILE",
            help="original files, folders with them, or URLs; by their names, test and val validate, the others train",
        )
        command.add_argument(
            "--val", nargs="+", default=[], metavar="FILE", help="files that validate, whatever their names"
        )
        command.add_argument(
            "--val-size", type=int, metavar="N", help="without validation files: take N rows out of training"
        )
        command.add_argument("--seed", type=int, default=0, help="which rows --val-size takes (default 0)")
        command.add_argument("--cache-dir", default=DataConfig.cache_dir, help="copies of URLs (default %(default)s)")
        _add_common(command, source.instruction)
    _add_reasoning_gym(commands)
    return parser


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


def _files(local_paths: Sequence[str], split: str | None, cache_dir: str) -> list[tuple[DataFile, str]]:
    """The files at the given paths, with the split of each; files in folders are sorted by name."""
    paths: list[str] = []
    for path in local_paths:
        if is_remote(path) or not Path(path).expanduser().is_dir():
            paths.append(path)
            continue
        inside = sorted(str(file) for file in Path(path).expanduser().rglob("*") if file.suffix in SUFFIXES)
        if not inside:
            raise DataError([f"folder {path} holds no file that ends in {', '.join(SUFFIXES)}; correct the path"])
        paths += inside
    return [(file, split or split_of(file.name)) for file in (resolve_files(paths, cache_dir) if paths else [])]


def _read(file: DataFile, source: Source, instruction: str) -> Rows:
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


def _report(split: Split, paths: dict[str, Path]) -> None:
    for reason, count in split.dropped.items():
        print(f"dropped {count} rows that {reason}")
    for name, rows in ((TRAIN, split.train), (VAL, split.val)):
        print(f"wrote {paths[name]}: {len(rows)} rows")
    print("columns:")
    for field in schema_of(split.train):
        print(f"  {field.name}: {field.type}")
    first = split.train[0]
    print(f"first prompt: {first['prompt']}\nits ground truth: {first['reward_model']['ground_truth']}")
    print(f"next: scalerl train data.train_files={paths[TRAIN]} data.val_files={paths[VAL]} ...")
