"""Reading of whole files as Arrow tables with all columns, and atomic writing of tables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scalerl.data.files import CHUNK_ROWS, SUFFIXES, DataFile, add_bad_column, json_records, python_rows
from scalerl.data.problems import DataError, FileProblems
from scalerl.whole_file import whole_file


@dataclass(frozen=True)
class FileTable:
    """The rows of one file.  name: as the user gave it.  first: number of its first row over all files."""

    name: str
    table: pa.Table
    first: int

    def chunks(
        self, columns: Sequence[str], problems: FileProblems, *, optional: Sequence[str] = ()
    ) -> Iterator[list[tuple[int, dict[str, Any]]]]:
        """Yields chunks of (row number in the file, {column: value}), of `columns` and the existing ones of `optional`.

        A column that is missing or occurs twice is added to `problems`; then nothing is yielded.
        """
        present = self.table.column_names
        for column in columns:
            if present.count(column) != 1:
                add_bad_column(problems, column, present)
        if problems:
            return
        wanted = [column for column in dict.fromkeys([*columns, *optional]) if present.count(column) == 1]
        table = self.table.select(wanted)
        row = 0
        for batch in table.to_batches(max_chunksize=CHUNK_ROWS):
            yield [(row + i, values) for i, values in python_rows(batch, row, problems)]
            row += batch.num_rows


def read_tables(files: Sequence[DataFile], max_rows: int = -1) -> list[FileTable]:
    """Reads the first max_rows rows of all files together; -1: all rows.

    Raises DataError for a file that cannot be read, and when there is no row.
    """
    tables: list[FileTable] = []
    num_rows = 0
    for file in files:
        table = _read(file)
        if max_rows != -1:
            table = table.slice(0, max_rows - num_rows)
        tables.append(FileTable(file.name, table, num_rows))
        num_rows += len(table)
    if not num_rows:
        raise DataError([f"{', '.join(file.name for file in files)}: no rows; give files with at least one row"])
    return tables


def _read(file: DataFile) -> pa.Table:
    problems = FileProblems(file.name)
    try:
        if Path(file.path).suffix == ".parquet":
            with pq.ParquetFile(file.path) as parquet:
                return parquet.read()
        records = list(json_records(file.path, problems))
        for row, record in records:
            if not isinstance(record, dict):
                problems.add(type(record).__name__, "write one JSON object per row", row=row)
        problems.raise_if_any()
        names = dict.fromkeys(name for _, record in records for name in record)
        return pa.table({name: [record.get(name) for _, record in records] for name in names})
    except (pa.ArrowException, OSError) as error:
        problem = f"a file that does not read as a table ({error})"
        problems.add(problem, f"write it again as one of {', '.join(SUFFIXES)}, each column of one type")
    problems.raise_if_any()
    raise AssertionError("unreachable")


def joined(tables: Sequence[FileTable]) -> pa.Table:
    """Joins the rows of all tables into one.  Raises DataError if a column has two incompatible types."""
    try:
        return pa.concat_tables([file.table for file in tables], promote_options="permissive")
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
