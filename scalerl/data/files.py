"""Reading of parquet, json and jsonl files, row by row, with errors that name file, row and column."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scalerl.data.local_copy import copy_to_local, is_remote, remote_name
from scalerl.data.problems import DataError, FileProblems

CHUNK_ROWS = 1024
SUFFIXES = (".parquet", ".json", ".jsonl")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Chunk = list[tuple[int, dict[str, Any]]]


@dataclass(frozen=True)
class DataFile:
    """A data file.  name: as the user gave it, for messages.  path: its local path."""

    name: str
    path: str


def resolve_files(
    data_files: str | os.PathLike | Sequence[str | os.PathLike],
    cache_dir: str | os.PathLike | None = None,
    suffixes: Sequence[str] = SUFFIXES,
) -> list[DataFile]:
    """Resolves one path or URL, or a list of them, to local files in the order given; URLs are copied to cache_dir.

    Raises DataError that names every path that does not exist or has an unknown suffix, or every URL that could not be
    copied.
    """
    paths = [data_files] if isinstance(data_files, str | os.PathLike) else list(data_files or [])
    problems = [] if paths else ["no data file is given; set data.train_files / data.val_files to one path or a list"]
    names = []
    for data_file in paths:
        if not isinstance(data_file, str | os.PathLike):
            problems.append(f"data file {data_file!r} is {type(data_file).__name__}; give a path")
            continue
        if is_remote(data_file):
            names.append(data_file)
            if PurePosixPath(remote_name(str(data_file))).suffix not in suffixes:
                problems.append(f"data file {data_file} must end in one of {', '.join(suffixes)}; name the file itself")
            continue
        path = Path(data_file).expanduser()
        names.append(str(path))
        if path.is_dir():
            problems.append(f"data file {path} is a directory; name its files ({', '.join(suffixes)}) in a list")
        elif not path.is_file():
            problems.append(f"data file {path} does not exist (working directory {Path.cwd()}); correct the path")
        elif path.suffix not in suffixes:
            made = " (`scalerl data own` makes one of a csv)" if path.suffix == ".csv" else ""
            problems.append(f"data file {path} has suffix '{path.suffix}'; use one of {', '.join(suffixes)}{made}")
    if problems:
        # Raised before anything is copied.
        raise DataError(problems)
    files = []
    for name in names:
        try:
            files.append(DataFile(name, copy_to_local(name, cache_dir, verbose=True)))
        except DataError as error:
            problems.extend(error.problems)
    if problems:
        raise DataError(problems)
    return files


def read_chunks(
    path: str, columns: Sequence[str], problems: FileProblems, *, optional: Sequence[str] = ()
) -> Iterator[Chunk]:
    """Yields chunks of CHUNK_ROWS rows, each row as (row number, {column: value}); row numbers start at 0.

    Other columns are not read; those of `optional` are included if the file has them. A row that cannot be read is
    added to `problems` and left out.
    """
    rows = _parquet_chunks if Path(path).suffix == ".parquet" else _json_chunks
    yield from rows(path, columns, problems, optional)


def _parquet_chunks(
    path: str, columns: Sequence[str], problems: FileProblems, optional: Sequence[str]
) -> Iterator[Chunk]:
    try:
        with pq.ParquetFile(path) as file:
            present = file.schema_arrow.names
            for column in columns:
                if present.count(column) != 1:
                    add_bad_column(problems, column, present)
            wanted = [column for column in dict.fromkeys([*columns, *optional]) if present.count(column) == 1]
            # Even without any column Arrow yields the row counts.
            row = 0
            for batch in file.iter_batches(batch_size=CHUNK_ROWS, columns=wanted):
                yield [(row + i, values) for i, values in python_rows(batch, row, problems)]
                row += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        problems.add(f"a file that is not readable parquet ({error})", "write it again, or correct its suffix")


def add_bad_column(problems: FileProblems, column: str, present: Sequence[str]) -> None:
    """Adds the problem of a column that a file lacks or has twice.  present: the file's columns."""
    if column in present:
        problems.add(f"{present.count(column)} columns of this name", "keep one", column=column)
        return
    near = difflib.get_close_matches(column, present, n=1)
    hint = f"rename '{near[0]}'" if near else "name one of these, or add it" if present else "add it"
    problems.add(f"no such column (the file has: {', '.join(present) or 'none'})", hint, column=column)


def python_rows(batch: pa.RecordBatch, first_row: int, problems: FileProblems) -> list[tuple[int, dict[str, Any]]]:
    """Converts the rows of an Arrow batch to (index in the batch, {column: value}).

    Rows with bytes that are no text are added to `problems` and left out.  first_row: row number of the batch's start.
    """
    # "float" is 32 bits, "halffloat" 16, "double" 64.
    short = {field.name: field.type for field in batch.schema if "float" in str(field.type)}

    def exact(values: dict[str, Any]) -> dict[str, Any]:
        return values | {name: _as_written(values[name], kind) for name, kind in short.items()} if short else values

    try:
        return [(i, exact(values)) for i, values in enumerate(batch.to_pylist())]
    except UnicodeDecodeError:
        pass  # Some row holds bytes that are not text: look for it value by value.
    good = []
    for i in range(batch.num_rows):
        values = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                values[name] = column[i].as_py()
            except UnicodeDecodeError as error:
                problems.add(f"text that is not UTF-8 ({error})", "write it as UTF-8", row=first_row + i, column=name)
        if len(values) == batch.num_columns:
            good.append((i, exact(values)))
    return good


def _as_written(value: Any, kind: pa.DataType) -> Any:
    """A value whose numbers of 16 and 32 bits are what they were written as: 0.1, not 0.10000000149011612."""
    if value is None:
        return None
    if pa.types.is_float32(kind) or pa.types.is_float16(kind):
        return float(str(kind.to_pandas_dtype()(value)))
    if pa.types.is_struct(kind):
        return {field.name: _as_written(value[field.name], field.type) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [_as_written(item, kind.value_type) for item in value]
    return value


def _json_chunks(path: str, columns: Sequence[str], problems: FileProblems, optional: Sequence[str]) -> Iterator[Chunk]:
    chunk: Chunk = []
    # Of the first row, as one message is for all rows that lack the same.
    first: dict[str, Any] | None = None
    for row, record in json_records(path, problems):
        if not isinstance(record, dict):
            problems.add(f"{type(record).__name__}", "write one JSON object per row", row=row)
            continue
        first = record if first is None else first
        missing = [column for column in columns if column not in record]
        for column in missing:
            near = difflib.get_close_matches(column, record, n=1)
            problem = f"no such key (the first row has: {', '.join(first) or 'none'})"
            hint = f"; rename '{near[0]}'" if near else ""
            problems.add(problem, f"every row needs the keys {', '.join(columns)}{hint}", row=row, column=column)
        if not missing:
            chunk.append((row, {column: record[column] for column in [*columns, *optional] if column in record}))
        if len(chunk) == CHUNK_ROWS:
            yield chunk
            chunk = []
    yield chunk


def _is_one_object(path: str) -> bool:
    """True for a .json file that holds one object over several lines: only the whole file is valid JSON."""
    if Path(path).suffix != ".json":
        return False
    with open(path, "rb") as file:
        try:
            json.loads(next((line for line in file if line.strip(b"\xef\xbb\xbf \t\r\n")), b"0").decode("utf-8-sig"))
            return False
        except ValueError:
            pass
        file.seek(0)
        try:
            return isinstance(json.loads(file.read().decode("utf-8-sig")), dict)
        except ValueError:
            return False


def json_records(path: str, problems: FileProblems) -> Iterator[tuple[int, Any]]:
    """Yields (row number, record) of a file: a JSON array, one object per line, or (.json) one object.

    Blank lines do not count as rows. A record with half of a character, which nothing can write, is added to `problems`
    and left out.
    """
    with open(path, "rb") as file:
        head = file.read(3)
        while head and not head.strip(b"\xef\xbb\xbf \t\r\n"):
            head = file.read(1)
        is_array = head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        file.seek(0)
        if is_array or _is_one_object(path):
            try:
                raw = file.read()
                whole = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_unrepeated)
            except ValueError as error:
                problems.add(f"a file that is not valid JSON ({error})", "write one array of objects, or one per line")
                return
            for row, record in enumerate(whole if is_array else [whole]):
                if _is_text(raw, record, row, problems):
                    yield row, record
            return
        row = 0
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not text.strip():
                continue
            try:
                record = json.loads(text.decode("utf-8"), object_pairs_hook=_unrepeated)
            except ValueError as error:
                problems.add("a line that is not valid JSON", "correct it", row=row, value=f"line {number}: {error}")
            else:
                if _is_text(text, record, row, problems):
                    yield row, record
            row += 1


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dict of a JSON object's pairs. Raises ValueError for a key that occurs twice: a dict has the last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return values


def _is_text(raw: bytes, record: Any, row: int, problems: FileProblems) -> bool:
    """True if all text of a record can be written; else adds a problem.  raw: what the record was read from."""
    if not _SURROGATE.search(raw) or (half := lone_surrogate(record)) is None:
        return True
    named = record if isinstance(record, dict) else {}
    columns = (name for name, value in named.items() if lone_surrogate([name, value]) is not None)
    column = next((name.encode(errors="backslashreplace").decode() for name in columns), None)
    problem = "half of a surrogate pair, which is no character"
    problems.add(problem, "write the whole character, or remove it", row=row, column=column, value=half)
    return False


def lone_surrogate(value: Any) -> str | None:
    """The first half of a surrogate pair in the texts of a value, as an escape; None if there is none."""
    try:
        json.dumps(value, ensure_ascii=False, default=str, skipkeys=True).encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    return None
