"""Reading of whole files as Arrow tables with all columns, and atomic writing of tables."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scalerl.base.files import whole_file
from scalerl.data.files import CHUNK_ROWS, SUFFIXES, DataFile, add_bad_column, json_records, python_rows
from scalerl.data.problems import DataError, FileProblems, excerpt


@dataclass(frozen=True)
class FileTable:
    """The rows of one file.

    name: as the user gave it.  content: an Arrow table, or the objects of a json file as it has them.
    first: number of its first row over all files.
    """

    name: str
    content: pa.Table | list[dict[str, Any]]
    first: int
    # Of the local file, for relative paths in it.
    directory: Path = Path()

    def __len__(self) -> int:
        return len(self.content)

    @cached_property
    def column_names(self) -> list[str]:
        """The names of the columns; of a json file the keys that any row has."""
        if isinstance(self.content, list):
            return list(dict.fromkeys(name for record in self.content for name in record))
        return self.content.column_names

    @cached_property
    def table(self) -> pa.Table:
        """The rows as parquet can have them.

        Raises DataError, naming columns and rows, for values of a json file that cannot be written.
        """
        if not isinstance(self.content, list):
            return self.content
        problems = FileProblems(self.name)
        columns = {
            name: _column(name, [record.get(name) for record in self.content], problems) for name in self.column_names
        }
        problems.raise_if_any()
        return pa.table(columns)

    def chunks(
        self, columns: Sequence[str], problems: FileProblems, *, optional: Sequence[str] = ()
    ) -> Iterator[list[tuple[int, dict[str, Any]]]]:
        """Yields chunks of (row number in the file, {column: value}), of `columns` and the existing ones of `optional`.

        A column that is missing or occurs twice is added to `problems`; then nothing is yielded.
        """
        present = self.column_names
        for column in columns:
            if present.count(column) != 1:
                add_bad_column(problems, column, present)
        if problems:
            return
        wanted = [column for column in dict.fromkeys([*columns, *optional]) if present.count(column) == 1]
        if isinstance(self.content, list):
            for row in range(0, len(self), CHUNK_ROWS):
                records = enumerate(self.content[row : row + CHUNK_ROWS], start=row)
                yield [(i, {name: record.get(name) for name in wanted}) for i, record in records]
            return
        row = 0
        for batch in self.content.select(wanted).to_batches(max_chunksize=CHUNK_ROWS):
            yield [(row + i, values) for i, values in python_rows(batch, row, problems)]
            row += batch.num_rows


def _column(name: str, values: list[Any], problems: FileProblems) -> pa.Array | pa.ChunkedArray | None:
    """The values as one column; None, with the reason added to `problems`, if they are of several types."""

    def fails(count: int) -> Exception | None:
        try:
            pa.array(values[:count])
        except (pa.ArrowException, OverflowError) as error:
            return error
        return None

    if (error := fails(len(values))) is not None:
        # The least number of rows that fail.
        row = bisect_left(range(1, len(values) + 1), True, key=lambda count: fails(count) is not None)
        problem = f"a value that parquet cannot have in one column with those before it ({fails(row + 1) or error})"
        advice = "write the column with one type in all rows, and integers above 64 bits as text"
        problems.add(problem, advice, row=row, column=name, value=excerpt(values[row]))
        return None
    column = pa.array(values)
    # Parquet has no dict that is without a key in every row.
    return pa.array([_without_empty(value) for value in values]) if "struct<>" in str(column.type) else column


def _without_empty(value: Any) -> Any:
    """A value with null in the place of every dict without keys."""
    if isinstance(value, dict):
        return {key: _without_empty(item) for key, item in value.items()} or None
    return [_without_empty(item) for item in value] if isinstance(value, list) else value


def read_tables(files: Sequence[DataFile], max_rows: int = -1) -> list[FileTable]:
    """Reads the first max_rows rows of all files together; -1: all rows.

    Raises DataError for a file that cannot be read, and when there is no row.
    """
    tables: list[FileTable] = []
    num_rows = 0
    for file in files:
        content = _read(file)
        if max_rows != -1:
            content = content[: max_rows - num_rows]
        tables.append(FileTable(file.name, content, num_rows, Path(file.path).parent))
        num_rows += len(content)
    if not num_rows:
        raise DataError([f"{', '.join(file.name for file in files)}: no rows; give files with at least one row"])
    return tables


def _read(file: DataFile) -> pa.Table | list[dict[str, Any]]:
    problems = FileProblems(file.name)
    try:
        if Path(file.path).suffix == ".parquet":
            with pq.ParquetFile(file.path) as parquet:
                return parquet.read()
        records = list(json_records(file.path, problems))
    except (pa.ArrowException, OSError) as error:
        problem = f"a file that does not read as a table ({error})"
        problems.add(problem, f"write it again as one of {', '.join(SUFFIXES)}, each column of one type")
        problems.raise_if_any()
        raise
    for row, record in records:
        if not isinstance(record, dict):
            problems.add(type(record).__name__, "write one JSON object per row", row=row)
    problems.raise_if_any()
    return [record for _, record in records]


def joined(tables: Sequence[FileTable]) -> pa.Table:
    """Joins the rows of all tables into one that can be written as parquet.  Raises DataError if there is none."""
    parts = [file.table for file in tables]
    try:
        return pa.concat_tables(parts, promote_options="permissive")
    except pa.ArrowException as error:
        names = ", ".join(file.name for file in tables)
        raise DataError([f"{names}: do not go into one table ({error}); give files with the same columns"]) from error


def with_columns(table: pa.Table, columns: Mapping[str, pa.Array | pa.ChunkedArray]) -> pa.Table:
    """The table with further columns, none of which it has yet."""
    for name, column in columns.items():
        assert name not in table.column_names, name
        table = table.append_column(name, column)
    return table


def write_table(table: pa.Table, path: Path) -> None:
    """Writes a table as parquet; it is on the disk when this returns, an existing file is replaced.  Raises OSError."""
    with whole_file(path) as file:
        pq.write_table(table, file)


def output_problems(key: str, path: str, inputs: Sequence[DataFile]) -> list[str]:
    """The reasons why a file cannot be written: it is an input or a directory, or its directory cannot be used."""
    output = Path(path).expanduser().resolve()
    problems = [
        f"{key} = {path}: is the input {file.name}, which would be lost; give another file"
        for file in inputs
        if Path(file.path).resolve() == output
    ]
    parent = next(directory for directory in output.parents if directory.exists())
    if output.is_dir():
        problems.append(f"{key} = {path}: is a directory; name a file in it")
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        problems.append(f"{key} = {path}: {parent} is no directory that can be written to; give another file")
    return problems
