"""Rows of training and of validation: no problem occurs twice or on both sides; files are checked before they count."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scalerl.data.files import read_chunks
from scalerl.data.problems import DataError, FileProblems
from scalerl.data.row_checks import PromptColumns, check_prompt_rows

TRAIN, VAL = "train", "val"
# The column that `scalerl sft` reads.
CONVERSATION = "messages"
_VALIDATION_NAMES = ("test", "val", "valid", "validation", "eval")

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Split:
    """Rows of training and of validation.  dropped: number of dropped rows by reason."""

    train: Rows
    val: Rows
    dropped: dict[str, int]

    @property
    def tables(self) -> dict[str, Rows]:
        """The rows by name of their file."""
        return {TRAIN: self.train, VAL: self.val}


def split_of(name: str) -> str:
    """The split of a file: by a word of its name, else by the whole name of a folder, the nearest first.

    test, val, valid, validation and eval mean validation, everything else training.
    """
    path = PurePath(name)
    for word in (*re.split(r"[-_.]", path.name.lower()), *(parent.name.lower() for parent in path.parents)):
        if word == TRAIN:
            return TRAIN
        if word in _VALIDATION_NAMES:
            return VAL
    return TRAIN


def split_rows(train: Rows, val: Rows, val_size: int | None, seed: int) -> Split:
    """Splits rows so that each prompt occurs once and on one side only.

    val_size: number of validation rows to take out of `train`; which ones depends only on their text and the seed.
    Raises DataError when either side would be empty.
    """
    dropped: dict[str, int] = {}
    val = _first_of_each(val, set(), dropped)
    train = _first_of_each(train, set(map(_key, val)), dropped)
    if not train:
        raise DataError(["no training rows; give a training file with --local"])
    if val_size is not None:
        if val:
            raise DataError(["--val-size is for data without validation files, and there are some; leave one out"])
        if not 0 < val_size < len(train):
            raise DataError([f"--val-size {val_size}: give 1 to {len(train) - 1}, of {len(train)} different rows"])
        taken = {i for _, i in sorted((_rank(row, seed), i) for i, row in enumerate(train))[:val_size]}
        val = [row for i, row in enumerate(train) if i in taken]
        train = [row for i, row in enumerate(train) if i not in taken]
    if not val:
        raise DataError(["no validation rows; give a file with --val, or take rows out with --val-size N"])
    for name, rows in ((TRAIN, train), (VAL, val)):
        for i, row in enumerate(rows):
            row["extra_info"] = {"split": name, "index": i} | row["extra_info"]
    return Split(train, val, dropped)


def _first_of_each(rows: Rows, validating: set[str], dropped: dict[str, int]) -> Rows:
    truths: dict[str, str] = {}
    kept = []
    for row in rows:
        key, truth = _key(row), row["reward_model"]["ground_truth"]
        if key in validating:
            _count(dropped, "are validation rows too")
        elif key not in truths:
            truths[key] = truth
            kept.append(row)
        else:
            same = truths[key] == truth
            _count(dropped, "repeat an earlier row" if same else "repeat an earlier row with another answer")
    return kept


def _count(dropped: dict[str, int], reason: str) -> None:
    dropped[reason] = dropped.get(reason, 0) + 1


def _key(row: dict[str, Any]) -> str:
    return json.dumps(row["prompt"], sort_keys=True)


def _rank(row: dict[str, Any], seed: int) -> str:
    return hashlib.sha256(f"{seed} {_key(row)}".encode()).hexdigest()


def five_columns(
    data_source: str, messages: list[dict[str, str]], ability: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """A row with the five columns, scored by a rule."""
    return {
        "data_source": data_source,
        "prompt": messages,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def question_with(instruction: str, question: str) -> list[dict[str, str]]:
    """The messages of a question, with the instruction behind it; "": none."""
    return [{"role": "user", "content": f"{question}\n\n{instruction}" if instruction else question}]


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
