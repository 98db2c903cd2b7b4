"""Shows all logs of an attempt as one: each line after the name of its log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.5


def logs_of(attempt: Path) -> dict[str, Path]:
    """Maps the name of each log of an attempt to its path, the driver's first; a name includes the log's directory."""
    paths = {str(path.relative_to(attempt).with_suffix("")): path for path in sorted(attempt.rglob("*.log"))}
    # Ray's own are many, and of interest when something else has led to them.
    kept = {name: path for name, path in paths.items() if not name.startswith(("ray/", "preflight/"))}
    return dict(sorted(kept.items(), key=lambda item: item[0] != "driver"))


def ends_of(attempt: Path, lines: int) -> Iterator[str]:
    """Yields the last lines of each log, after its name."""
    logs = logs_of(attempt)
    for name, path in logs.items():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in deque(file, maxlen=lines):
                yield _prefixed(name, line, logs)


def followed(attempt: Path, poll_s: float = POLL_S) -> Iterator[str]:
    """Yields the lines that are added to the logs after this call, to new logs too; never ends.

    attempt: of a link (`latest`) the lines of the attempts to come follow, each after the line `----- attempt_N`.
    """
    current = attempt.resolve()
    return _added(attempt, current, {name: path.stat().st_size for name, path in logs_of(current).items()}, poll_s)


def _added(attempt: Path, current: Path, read: dict[str, int], poll_s: float) -> Iterator[str]:
    """Yields the lines behind the bytes of each log that have been read.

    current: the attempt that was read.  read: log -> bytes, changed in place.
    """
    while True:
        # Looked at before the logs are read: what the old attempt wrote until the link moved is read first.
        newest = attempt.resolve()
        logs = logs_of(current)
        for name, path in logs.items():
            with path.open("rb") as file:
                file.seek(read.get(name, 0))
                # A line that is still being written waits for its end.
                whole, end, _ = file.read().rpartition(b"\n")
                read[name] = read.get(name, 0) + len(whole) + len(end)
            for line in whole.splitlines():
                yield _prefixed(name, line.decode("utf-8", errors="replace"), logs)
        if newest != current:
            current = newest
            read.clear()
            yield f"----- {current.name}"
            continue
        time.sleep(poll_s)


def _prefixed(name: str, line: str, logs: dict[str, Path]) -> str:
    return f"{name:{max(map(len, logs))}} | {line.rstrip()}"
