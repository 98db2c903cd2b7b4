"""Backend `file`: metrics.jsonl, timeline.jsonl and tables as JSON in the run's directory; and a reader of lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scalerl.tracking.backend import RunInfo, register_backend
from scalerl.tracking.timeline import Span

METRICS, TIMELINE = "metrics.jsonl", "timeline.jsonl"


@register_backend("file")
class FileBackend:
    """Appends one object per log call to metrics.jsonl, one per step to timeline.jsonl, and writes tables to
    tables/{name}/step_{step}.json.

    A line for which there is no room raises OSError; it is written before the next one, or by `finish`.
    """

    def __init__(self, run: RunInfo) -> None:
        self.run_dir = run.run_dir
        self._metrics = _Lines(self.run_dir / METRICS, run.resumed_from)
        self._timeline = _Lines(self.run_dir / TIMELINE, run.resumed_from)

    def log(self, data: Mapping[str, float], step: int, time_s: float) -> None:
        self._metrics.write({"step": step, "data": {key: _json_number(value) for key, value in data.items()}})

    def log_timeline(self, spans: Iterable[Span], step: int) -> None:
        self._timeline.write({"step": step, "spans": [span.as_list() for span in spans]})

    def log_artifact(self, path: Path) -> None:
        """Does nothing: the file is in the file system already."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        path = self.run_dir / "tables" / name / f"step_{step}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = {"columns": list(columns), "data": [list(row) for row in rows]}
        path.write_text(json.dumps(table, ensure_ascii=False, default=str) + "\n", encoding="utf-8")

    def finish(self, status: str) -> None:
        try:
            self._metrics.close()
        finally:
            self._timeline.close()


class _Lines:
    """A file of JSON objects, one a line.

    If the file has lines already, the process first writes {"resumed_from": step}: the lines after it replace earlier
    ones of greater steps.
    """

    def __init__(self, path: Path, resumed_from: int) -> None:
        drop_torn_line(path)
        self._file = path.open("ab", buffering=0)
        # Lines that could not be written yet.
        self._waiting = b""
        if path.stat().st_size:
            self.write({"resumed_from": resumed_from})

    def write(self, line: dict[str, Any]) -> None:
        self._waiting += json.dumps(line, ensure_ascii=False).encode() + b"\n"
        self._write_waiting()

    def close(self) -> None:
        with self._file:
            self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            # On a full disk less than asked for, before the next call raises: the rest of the line follows its begin.
            self._waiting = self._waiting[self._file.write(self._waiting) :]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of such a file that no resume has replaced, in order. []: no file. Raises ValueError for a line that
    is no JSON, which says the file and the line's number."""
    lines: list[dict[str, Any]] = []
    for line in _parsed(path) if path.is_file() else ():
        if "resumed_from" in line:
            lines = [earlier for earlier in lines if earlier["step"] <= line["resumed_from"]]
        else:
            lines.append(line)
    return lines


def read_metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """metrics.jsonl as step -> numbers; a resume replaces what the process before it logged later. {}: no file."""
    steps: dict[int, dict[str, float]] = {}
    for line in read_lines(run_dir / METRICS):
        steps.setdefault(line["step"], {}).update(line["data"])
    return steps


def _parsed(path: Path) -> Iterator[dict[str, Any]]:
    # The last line of a run that goes on may be half written.
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            yield json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error


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
