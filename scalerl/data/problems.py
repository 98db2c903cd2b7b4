"""Problems of an input file, which are collected row by row and shown together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from scalerl.errors import UserError

MAX_PROBLEMS_PER_FILE = 20
_MAX_ROWS_SHOWN = 5
_MAX_VALUE_CHARS = 80


class DataError(UserError):
    """Raised for input data that cannot be used.

    problems: one line each, with file, row (from 0), column, what was found and what to do.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        # One positional argument, from which pickle can rebuild the error in another process.
        super().__init__(tuple(problems))
        self.problems = tuple(problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return f"{len(self.problems)} problems in the data:\n" + "\n".join(f"  - {line}" for line in self.problems)


class FileProblems:
    """The problems of one file; rows with the same problem share a line."""

    def __init__(self, path: str) -> None:
        self.path = path
        # By (column, problem, advice): (value in the first row, rows).
        self._groups: dict[tuple[str | None, str, str], tuple[str, list[int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def full(self) -> bool:
        """True when another problem would not be shown."""
        return len(self._groups) >= MAX_PROBLEMS_PER_FILE

    def add(
        self, problem: str, advice: str, *, row: int | None = None, column: str | None = None, value: str = ""
    ) -> None:
        """Adds a problem.

        problem: what was found; the same text for every row with this problem.  value: the example in this row.
        """
        key = (column, problem, advice)
        if key not in self._groups and self.full:
            return
        _, rows = self._groups.setdefault(key, (value, []))
        if row is not None:
            rows.append(row)

    def raise_if_any(self) -> None:
        """Raises DataError with every problem of the file."""
        if not self._groups:
            return
        lines = [
            f"{self.path}: {_place(rows, column)}found {problem}{f' ({value})' if value else ''}; {advice}"
            for (column, problem, advice), (value, rows) in self._groups.items()
        ]
        if self.full:
            lines.append(f"{self.path}: reading stopped at {MAX_PROBLEMS_PER_FILE} problems; there may be more")
        raise DataError(lines)


def _place(rows: list[int], column: str | None) -> str:
    parts = []
    if rows:
        parts.append(shown_rows(rows))
    if column is not None:
        parts.append(f"column '{column}'")
    return ", ".join(parts) + ": " if parts else ""


def shown_rows(rows: Sequence[int]) -> str:
    """Row numbers for messages; the first ones of many."""
    more = f" and {len(rows) - _MAX_ROWS_SHOWN} more" if len(rows) > _MAX_ROWS_SHOWN else ""
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:_MAX_ROWS_SHOWN]))}{more}"


def type_name(value: Any) -> str:
    """The name of a value's type; "null" for None."""
    return "null" if value is None else type(value).__name__


def excerpt(value: Any) -> str:
    """A value as one short line of text; "" for null."""
    if value is None:
        return ""
    try:
        text = json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."
