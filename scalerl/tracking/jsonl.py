"""Backend `file`: metrics.jsonl and tables as JSON in the run's directory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scalerl.tracking.backend import RunInfo, register_backend


@register_backend("file")
class FileBackend:
    """Appends one object per log call to metrics.jsonl, and writes tables to tables/{name}/step_{step}.json.

    If the file has lines already, the process first writes {"resumed_from": step}: the lines after it replace earlier
    ones of greater steps.
    A line for which there is no room raises OSError; it is written before the next one, or by `finish`.
    """

    def __init__(self, run: RunInfo) -> None:
        self.run_dir = run.run_dir
        path = self.run_dir / "metrics.jsonl"
        drop_torn_line(path)
        self._file = path.open("ab", buffering=0)
        # Lines that could not be written yet.
        self._waiting = b""
        if path.stat().st_size:
            self._write({"resumed_from": run.resumed_from})

    def log(self, data: Mapping[str, float], step: int, time_s: float) -> None:
        self._write({"step": step, "data": {key: _json_number(value) for key, value in data.items()}})

    def log_artifact(self, path: Path) -> None:
        """Does nothing: the file is in the file system already."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        path = self.run_dir / "tables" / name / f"step_{step}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = {"columns": list(columns), "data": [list(row) for row in rows]}
        path.write_text(json.dumps(table, ensure_ascii=False, default=str) + "\n", encoding="utf-8")

    def finish(self, status: str) -> None:
        with self._file:
            self._write_waiting()

    def _write(self, line: dict[str, Any]) -> None:
        self._waiting += json.dumps(line, ensure_ascii=False).encode() + b"\n"
        self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            # On a full disk less than asked for, before the next call raises: the rest of the line follows its begin.
            self._waiting = self._waiting[self._file.write(self._waiting) :]


def drop_torn_line(path: Path) -> None:
    """Removes an incomplete last line, which a process that was killed while writing has left."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            os.fsync(file.fileno())


def _json_number(value: float) -> float | str:
    """A number for JSON; NaN and infinities, which JSON lacks, become text."""
    return value if math.isfinite(value) else str(value)
