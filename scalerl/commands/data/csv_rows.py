"""Rows of a csv file with a header, with errors that name row and column."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence

from scalerl.data.files import CHUNK_ROWS, Chunk, add_bad_column
from scalerl.data.problems import FileProblems


def csv_chunks(path: str, columns: Sequence[str], problems: FileProblems) -> Iterator[Chunk]:
    """Yields chunks of rows, each row as (row number, {column: text}), as `files.read_chunks` does.

    The header does not count as a row; a text may have several lines.
    """
    csv.field_size_limit(sys.maxsize)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            for column in columns:
                if header.count(column) != 1:
                    add_bad_column(problems, column, header)
            if problems:
                return
            yield from _chunks(reader, header, columns, problems)
    except (csv.Error, UnicodeDecodeError) as error:
        problems.add(f"a file that is not readable csv ({error})", "write it as UTF-8 text with commas and quotes")


def _chunks(
    reader: Iterator[list[str]], header: list[str], columns: Sequence[str], problems: FileProblems
) -> Iterator[Chunk]:
    chunk: Chunk = []
    # Blank lines do not count as rows.
    for row, fields in enumerate(fields for fields in reader if fields):
        if len(fields) != len(header):
            problem = f"{len(fields)} fields, where the header has {len(header)}"
            problems.add(problem, "quote a text that has commas or line ends", row=row)
            continue
        record = dict(zip(header, fields, strict=True))
        chunk.append((row, {column: record[column] for column in columns}))
        if len(chunk) == CHUNK_ROWS:
            yield chunk
            chunk = []
    yield chunk
