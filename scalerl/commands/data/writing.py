"""Writing of parquet files, which are checked before they get their final names."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scalerl.data.files import read_chunks
from scalerl.data.problems import DataError, FileProblems
from scalerl.data.row_checks import PromptColumns, check_prompt_rows

# The column that `scalerl sft` reads.
CONVERSATION = "messages"


def schema_of(rows: list[dict[str, Any]]) -> pa.Schema:
    """The schema of rows with the five columns, or of conversations.

    extra_info has the keys of the first row, each a text or a whole number.
    """
    text = pa.string()
    messages = pa.list_(pa.struct([("role", text), ("content", text)]))
    if CONVERSATION in rows[0]:
        return pa.schema([(CONVERSATION, messages)])
    extra = rows[0]["extra_info"]
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", messages),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            (
                "extra_info",
                pa.struct([(key, pa.int64() if isinstance(value, int) else text) for key, value in extra.items()]),
            ),
        ]
    )


def write_all(tables: dict[str, list[dict[str, Any]]], out: Path, *, overwrite: bool) -> dict[str, Path]:
    """Writes each table to out/<name>.parquet; all are read back and compared before the first gets its name.

    Raises DataError when a file exists already and overwrite is False.
    """
    paths = {name: out / f"{name}.parquet" for name in tables}
    existing = [str(path) for path in paths.values() if path.exists()]
    if existing and not overwrite:
        raise DataError([f"{', '.join(existing)}: exists already; give another --out, or --overwrite"])
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=out) as unfinished:
            unfinished_paths = {name: Path(unfinished) / f"{name}.parquet" for name in tables}
            for name, rows in tables.items():
                pq.write_table(pa.Table.from_pylist(rows, schema_of(rows)), unfinished_paths[name])
                _check(unfinished_paths[name], rows)
                with open(unfinished_paths[name], "rb") as file:
                    os.fsync(file.fileno())
            for name, path in paths.items():
                os.replace(unfinished_paths[name], path)
    except OSError as error:
        raise DataError(
            [f"--out {out}: cannot be written ({error}); give a directory that you can write to"]
        ) from error
    return paths


def _check(path: Path, rows: list[dict[str, Any]]) -> None:
    """Makes the checks of a training run, and compares the file with the rows that were written."""
    problems, columns = FileProblems(str(path)), PromptColumns()
    is_conversation = CONVERSATION in rows[0]
    read = []
    for chunk in read_chunks(str(path), [CONVERSATION] if is_conversation else columns.names, problems):
        if not is_conversation:
            check_prompt_rows(chunk, columns, problems)
        read += [values for _, values in chunk]
    problems.raise_if_any()
    assert read == rows, f"{path} does not give back the rows that were written"
