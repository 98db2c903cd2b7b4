"""Conversion of the user's own files, by column names, to prompts with a ground truth or to conversations."""

from __future__ import annotations

import csv
import string
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from scalerl.commands.data.splits import five_columns
from scalerl.data.files import SUFFIXES, Chunk, add_bad_column, read_chunks
from scalerl.data.problems import DataError, FileProblems, excerpt, type_name
from scalerl.data.row_checks import check_messages

NAME = "own"
ABOUT = "your own csv, json, jsonl or parquet, or a data set of the Hugging Face hub: columns by name"
OWN_SUFFIXES = (*SUFFIXES, ".csv")
# Files in folders of data sets that hold no rows.
NO_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
# Decimal digits that a number of 64 bits can hold: where it shows more, the last ones are of its rounding.
_MAX_DIGITS = 15
_MISSING = ("nan", "none", "null", "nat", "na", "n/a", "<na>")


@dataclass(frozen=True)
class OwnColumns:
    """The columns and texts that a row is made from.

    prompt: column with text or messages.  answer: column with the ground truth, or what the assistant says; None: none.
    template: text with {column}, in place of the prompt's own.  system: a message before the prompt.
    is_sft: conversations, for `scalerl sft`.
    """

    prompt: str | None
    answer: str | None
    template: str | None
    system: str | None
    data_source: str
    is_sft: bool

    @property
    def needed(self) -> list[str]:
        """Names of the columns to read.  Raises DataError for a template that cannot be filled."""
        names = [self.prompt, *self._template_columns(), self.answer]
        return list(dict.fromkeys(name for name in names if name is not None))

    def _template_columns(self) -> list[str]:
        if self.template is None:
            return []
        try:
            parts = list(string.Formatter().parse(self.template))
        except ValueError as error:
            raise DataError([f"--template {self.template!r}: {error}; write {{{{ and }}}} for braces"]) from None
        fields = [(name, written) for _, name, *written in parts if name is not None]
        # Attributes and items of a value are no columns, and a format ({column:...}, {column!r}) changes its text.
        if not fields or any(not name or set(name) & set(".[") or any(written) for name, written in fields):
            advice = "write {column} where the text of a column goes, and {{ and }} for braces of the text"
            raise DataError([f"--template {self.template!r}: {advice}"])
        return [name for name, _ in fields]

    def row(self, row: int, record: dict[str, Any], problems: FileProblems) -> dict[str, Any] | None:
        """Converts a record to a row, or returns None with the reason added to `problems`.

        A conversation is in the column prompt as a whole.
        """
        messages = self._prompt(row, record, problems)
        answer = "" if self.answer is None else _text(record[self.answer], row, self.answer, problems)
        if messages is None or answer is None:
            return None
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        if self.is_sft:
            messages = messages if self.answer is None else [*messages, {"role": "assistant", "content": answer}]
            if messages[-1]["role"] != "assistant":
                advice = "name the column of the answers with --answer"
                problems.add("no assistant message at the end", advice, row=row, column=self.prompt)
                return None
            answer = ""
        return five_columns(self.data_source, messages, "", answer, {"source_row": row})

    def _prompt(self, row: int, record: dict[str, Any], problems: FileProblems) -> list[dict[str, str]] | None:
        if self.template is not None:
            texts = {name: _text(record[name], row, name, problems) for name in self._template_columns()}
            if None in texts.values():
                return None
            return [{"role": "user", "content": self.template.format_map(texts)}]
        assert self.prompt is not None, "checked with the arguments"
        value = record[self.prompt]
        if not isinstance(value, list):
            text = _text(value, row, self.prompt, problems)
            return None if text is None else [{"role": "user", "content": text}]
        messages = check_messages(value, row, self.prompt, problems)
        if messages is None:
            return None
        if more := sorted({name for message in messages for name in message} - {"role", "content"}):
            problem = f"messages with {', '.join(more)}, which would be lost"
            problems.add(problem, "write these rows as parquet yourself: they are taken as they are", row=row)
            return None
        return [{"role": message["role"], "content": message["content"]} for message in messages]


def _text(value: Any, row: int, column: str, problems: FileProblems) -> str | None:
    """A text or a number as text; None, with the reason added to `problems`, for anything else."""
    if isinstance(value, str) and value.strip():
        return value
    problem = "empty text" if isinstance(value, str) else f"{type_name(value)}, neither text nor a number"
    if isinstance(value, int | float | Decimal):
        try:
            return number_text(value)
        except ValueError as error:
            problem = str(error)
    problems.add(problem, "write it as text, or remove the row", row=row, column=column, value=excerpt(value))
    return None


def read_own(path: str, name: str, columns: OwnColumns) -> list[dict[str, Any]]:
    """Reads every row of a file.  Raises DataError with all problems of the file."""
    problems, rows = FileProblems(name), []
    needed, answers = columns.needed, []
    read = csv_chunks if Path(path).suffix == ".csv" else read_chunks
    for chunk in read(path, needed, problems):
        for row, record in chunk:
            if record.keys() >= set(needed) and (converted := columns.row(row, record, problems)) is not None:
                rows.append(converted)
                answers.append((row, None if columns.answer is None else record[columns.answer]))
        if problems.full:
            break
    if columns.answer is not None:
        check_numbers([(row, text) for row, text in answers if isinstance(text, str)], columns.answer, problems)
    problems.raise_if_any()
    return rows


def csv_chunks(path: str, columns: Sequence[str], problems: FileProblems) -> Iterator[Chunk]:
    """Yields the rows of a csv file with a header, each as (row number, {column: text}), as `files.read_chunks` does.

    Neither the header nor a blank line counts as a row; a text may have several lines.
    """
    csv.field_size_limit(sys.maxsize)
    chunk: Chunk = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            for column in columns:
                if header.count(column) != 1:
                    add_bad_column(problems, column, header)
            for row, fields in enumerate(filter(None, reader)) if not problems else ():
                if len(fields) != len(header):
                    problem = f"{len(fields)} fields, where the header has {len(header)}"
                    problems.add(problem, "quote a text that has commas or line ends", row=row)
                    continue
                record = dict(zip(header, fields, strict=True))
                chunk.append((row, {column: record[column] for column in columns}))
    except (csv.Error, UnicodeDecodeError) as error:
        problems.add(f"a file that is not readable csv ({error})", "write it as UTF-8 text with commas and quotes")
    yield chunk


def number_text(value: int | float | Decimal) -> str:
    """A number without exponent and needless zeros: 72 for 72.0, 10000000000000000 for 1e16.

    Raises ValueError for a number that is none (NaN, infinite), shows its rounding (0.30000000000000004), or is a
    truth value.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value}, a truth value")
    if isinstance(value, int):
        return str(value)
    number = Decimal(repr(value)) if isinstance(value, float) else value
    if not number.is_finite():
        raise ValueError(f"{value}, which is no number")
    if isinstance(value, float) and len(number.normalize().as_tuple().digits) > _MAX_DIGITS:
        raise ValueError("a number that shows its rounding")
    text = format(number, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return text if number else "0"


def check_numbers(texts: Sequence[tuple[int, str]], column: str, problems: FileProblems) -> None:
    """Adds a problem for texts that are no answers in a column whose other texts are all numbers.

    They are words for a missing value, exponents, and the roundings of a program that wrote them.
    texts: (row, text).
    """
    shown_of = {row: text.strip().replace(",", "") for row, text in texts}
    try:
        numbers = {row: Decimal(shown) for row, shown in shown_of.items() if shown.lower() not in _MISSING}
    except InvalidOperation:
        return
    if not any(number.is_finite() for number in numbers.values()):
        return
    for row, shown in shown_of.items():
        number = numbers.get(row)
        if number is None or not number.is_finite():
            _add("no number, where the other rows have one", row, column, shown, problems)
        elif "e" in shown.lower():
            _add("a number with an exponent", row, column, shown, problems)
        elif "." in shown and len(number.normalize().as_tuple().digits) > _MAX_DIGITS and repr(float(shown)) == shown:
            _add("a number that shows its rounding", row, column, shown, problems)


def _add(what: str, row: int, column: str, text: str, problems: FileProblems) -> None:
    problems.add(what, "write it as a response should have it, or remove the row", row=row, column=column, value=text)


def as_conversations(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with only the column that `scalerl sft` reads."""
    return [{"messages": row["prompt"]} for row in rows]
