"""Backend `console`: lines of progress, or a live panel, on standard output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scalerl.tracking.backend import RunInfo, register_backend
from scalerl.tracking.progress import Progress

_MAX_CELL = 200


@register_backend("console")
class ConsoleBackend:
    """Prints progress; the only backend without a thread, so that its lines stay in order with other output."""

    def __init__(self, run: RunInfo) -> None:
        self.progress = Progress(run.total_steps)

    def log(self, data: Mapping[str, float], step: int, time_s: float) -> None:
        self.progress.update(step, data)

    def log_artifact(self, path: Path) -> None:
        """Does nothing: the console shows no files."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self.progress.message(f"{name} at step {step}:")
        for row in rows:
            cells = (f"{column}={_printable(cell)}" for column, cell in zip(columns, row, strict=True))
            self.progress.message("  " + "  ".join(cells))

    def finish(self, status: str) -> None:
        self.progress.close()


def _printable(cell: Any) -> str:
    """A cell as one line of text, with control characters escaped, which a model may have sampled."""
    text = f"{cell:.3f}" if isinstance(cell, float) else str(cell)
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 1] + "…"
