"""Queue on disk of the records that a tracking server has not taken yet."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scalerl.tracking.jsonl import drop_torn_line

Record = dict[str, Any]


class Spool:
    """A queue of JSON records in {directory}/records.jsonl, which outlives the process.

    An empty spool has no directory. Records that a process delivered return in the next process unless all were
    delivered, so delivering a record twice must be harmless.
    Raises ValueError for a file that holds something else.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path = directory / "records.jsonl"
        drop_torn_line(self._path)
        self._offset = 0
        self._num = 0
        if self._path.exists():
            with self._path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    try:
                        json.loads(line)
                    except ValueError as error:
                        raise ValueError(
                            f"{self._path}, line {number}: not JSON ({error}): remove the line, its record is lost"
                        ) from error
                    self._num += 1

    def __len__(self) -> int:
        return self._num

    def append(self, record: Record) -> None:
        """Adds a record at the end of the queue."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self._num += 1

    def keep(self, path: Path) -> Path:
        """Copies a file or directory, under its own name, for a record that needs it later; returns the copy's path."""
        target = self.directory / "files" / uuid.uuid4().hex / path.name
        target.parent.mkdir(parents=True)
        if path.is_dir():
            shutil.copytree(path, target)
        else:
            shutil.copy2(path, target)
        return target

    def deliver(self, send: Callable[[Record], None]) -> None:
        """Sends all records, oldest first; one that `send` raises an error for stays, with those behind it."""
        while self._num:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                record, offset = json.loads(file.readline()), file.tell()
            send(record)
            self._offset = offset
            self._num -= 1
        if self.directory.exists():
            shutil.rmtree(self.directory)
        self._offset = 0
