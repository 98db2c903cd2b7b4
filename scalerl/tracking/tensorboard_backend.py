"""Backend `tensorboard`: event files in {run_dir}/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scalerl.tracking.backend import RunInfo, flat_config, register_backend

_FLUSH_S = 10


@register_backend("tensorboard", package="tensorboard")
class TensorboardBackend:
    """Records scalars under their keys, and tables and configuration as text.

    The events of a resumed run hide those of the steps that it repeats.
    """

    def __init__(self, run: RunInfo) -> None:
        # Protobuf creates these classes at run time.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        self._writer = EventFileWriter(str(run.run_dir / "tensorboard"), flush_secs=_FLUSH_S)
        if not run.is_new:
            # TensorBoard drops the events of earlier files in the directory from this step on.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=run.first_step, session_log=start))
        rows = [[key, value] for key, value in flat_config(run.config).items()]
        if rows:
            self.log_table("config", ["key", "value"], rows, run.resumed_from)
        self._writer.flush()

    def log(self, data: Mapping[str, float], step: int, time_s: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = [Summary.Value(tag=key, simple_value=value) for key, value in data.items()]
        self._writer.add_event(self._event(wall_time=time_s, step=step, summary=Summary(value=values)))

    def log_artifact(self, path: Path) -> None:
        """Does nothing: event files cannot hold files."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        import time

        from tensorboard.plugins.text.summary_v2 import text_pb

        lines = [_markdown_row(columns), "|" + " --- |" * len(columns), *map(_markdown_row, rows)]
        summary = text_pb(name, "\n".join(lines))
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def finish(self, status: str) -> None:
        self._writer.close()


def _markdown_row(cells: Sequence[Any]) -> str:
    """A row of a Markdown table, escaped so that a model's text is not taken as markup."""
    shown = (str(cell).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;") for cell in cells)
    return "| " + " | ".join(text.replace("\r", "").replace("\n", "<br>") for text in shown) + " |"
