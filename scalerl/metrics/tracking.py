"""`Tracking`: one call logs to every configured backend; none of them can stop a step."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from scalerl.metrics.metric import Metric
from scalerl.metrics.mlflow_backend import STATUSES, MlflowBackend
from scalerl.metrics.progress import Progress

logger = logging.getLogger(__name__)

_MAX_CELL = 200


class Backend(Protocol):
    def log(self, data: Mapping[str, float], step: int) -> None: ...
    def log_artifact(self, path: str | Path) -> None: ...
    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None: ...
    def finish(self, status: str) -> None: ...


class Tracking:
    """default_backend: a name or names of `supported_backend`.  config: the run's configuration as nested mapping.

    run_dir: where files of this run go, made when missing.  mlflow_tracking_uri: None: sqlite in run_dir.
    run_id: MLflow run to continue.  resumed_from: the step that this process starts from (0: the beginning).
    wait: False returns while MLflow is still being opened; a failure then shows in `wait_started` or the first log.
    logger: name -> backend.
    Raises ValueError for an unknown backend, RuntimeError or OSError with the cause when a backend cannot start.
    Afterwards a backend that fails is reported once, and the others go on.
    """

    supported_backend = ("console", "mlflow", "file")

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Mapping[str, Any] | None = None,
        *,
        run_dir: str | Path,
        mlflow_tracking_uri: str | None = None,
        run_id: str | None = None,
        total_steps: int | None = None,
        resumed_from: int = 0,
        wait: bool = True,
    ) -> None:
        names = [default_backend] if isinstance(default_backend, str) else list(dict.fromkeys(default_backend))
        unknown = [name for name in names if name not in self.supported_backend]
        if unknown:
            raise ValueError(
                f"trainer.logger: unknown backend {', '.join(map(repr, unknown))}; "
                f"use any of {', '.join(self.supported_backend)}"
            )
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.logger: dict[str, Backend] = {}
        self._broken: set[str] = set()
        self._unloggable: set[str] = set()
        self._finished = False
        # First, because its import takes seconds and runs beside the rest.
        if "mlflow" in names:
            self.logger["mlflow"] = MlflowBackend(
                project_name, experiment_name, run_dir, tracking_uri=mlflow_tracking_uri, run_id=run_id, config=config
            )
        try:
            if "file" in names:
                self.logger["file"] = FileBackend(run_dir, resumed_from)
            if wait:
                self.wait_started()
            # Last: its panel would hide the message of a backend that does not start.
            if "console" in names:
                self.logger["console"] = ConsoleBackend(total_steps)
        except BaseException:
            self._close_all("FAILED")
            raise

    def wait_started(self) -> None:
        """Raises RuntimeError when MLflow could not be opened."""
        if isinstance(mlflow := self.logger.get("mlflow"), MlflowBackend):
            mlflow.wait_started()

    @property
    def run_id(self) -> str | None:
        """Of the MLflow run; None without mlflow. Waits until the run is open."""
        mlflow = self.logger.get("mlflow")
        return mlflow.run_id if isinstance(mlflow, MlflowBackend) else None

    @property
    def tracking_uri(self) -> str | None:
        """Where MLflow's runs are; None without mlflow."""
        mlflow = self.logger.get("mlflow")
        return mlflow.tracking_uri if isinstance(mlflow, MlflowBackend) else None

    def log(self, data: Mapping[str, Metric | float], step: int, backend: str | Sequence[str] | None = None) -> None:
        """backend: only to these; default: all. A value that is not a number is left out, with one warning per key."""
        self.wait_started()
        numbers = self._numbers(data)
        only = None if backend is None else {backend} if isinstance(backend, str) else set(backend)
        self._each(lambda each: each.log(numbers, step), only)

    def log_artifact(self, path: str | Path) -> None:
        """A file or directory of the run, to the backends that keep such (mlflow)."""
        self._each(lambda each: each.log_artifact(path))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Rows of text and numbers. The only call that hands prompts and responses to a backend."""
        self._each(lambda each: each.log_table(name, columns, rows, step))

    def phase(self, name: str) -> None:
        """What the run does now, for the progress display."""
        if isinstance(console := self.logger.get("console"), ConsoleBackend):
            self._guard("console", lambda: console.progress.phase(name))

    def message(self, text: str) -> None:
        """A line for the person who watches; without a console it goes to the log."""
        if isinstance(console := self.logger.get("console"), ConsoleBackend):
            self._guard("console", lambda: console.progress.message(text))
        else:
            logger.info("%s", text)

    def finish(self, status: str = "FINISHED") -> None:
        """status: FINISHED | FAILED | KILLED. Writes what is pending. Again: nothing."""
        if status not in STATUSES:
            raise ValueError(f"Tracking.finish: status {status!r}, use one of {', '.join(STATUSES)}")
        if not self._finished:
            self._close_all(status)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)
        self.finish("FINISHED" if kind is None else "KILLED" if stopped else "FAILED")

    def _close_all(self, status: str) -> None:
        self._finished = True
        # The console first: warnings of the others then appear below its last line, not inside the panel.
        for name in sorted(self.logger, key=lambda name: name != "console"):
            self._guard(name, lambda name=name: self.logger[name].finish(status))

    def _each(self, call: Callable[[Backend], None], only: set[str] | None = None) -> None:
        if self._finished:
            return
        for name, backend in self.logger.items():
            if only is None or name in only:
                self._guard(name, lambda backend=backend: call(backend))

    def _guard(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if name not in self._broken:
                self._broken.add(name)
                logger.warning(
                    "tracking backend %r failed, training goes on, later failures of it are not reported: %s: %s",
                    name,
                    type(error).__name__,
                    error,
                )

    def _numbers(self, data: Mapping[str, Any]) -> dict[str, float]:
        numbers = {}
        for key, value in data.items():
            try:
                numbers[key] = float(value.value if isinstance(value, Metric) else value)
            except (TypeError, ValueError, RuntimeError):
                if key not in self._unloggable:
                    self._unloggable.add(key)
                    logger.warning("metric %r is a %s, not a number: not logged", key, type(value).__name__)
        return numbers


class ConsoleBackend:
    """Lines, or a live panel, on standard output."""

    def __init__(self, total_steps: int | None) -> None:
        self.progress = Progress(total_steps)

    def log(self, data: Mapping[str, float], step: int) -> None:
        self.progress.update(step, data)

    def log_artifact(self, path: str | Path) -> None:
        """Nothing to show."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self.progress.message(f"{name} at step {step}:")
        for row in rows:
            cells = (f"{column}={_printable(cell)}" for column, cell in zip(columns, row, strict=True))
            self.progress.message("  " + "  ".join(cells))

    def finish(self, status: str) -> None:
        self.progress.close()


class FileBackend:
    """metrics.jsonl, one object per log call, appended; tables/{name}/step_{step}.json.

    A process that finds lines there begins with {"resumed_from": step}: later lines replace those of greater steps.
    """

    def __init__(self, run_dir: Path, resumed_from: int) -> None:
        self.run_dir = run_dir
        path = run_dir / "metrics.jsonl"
        _drop_torn_line(path)
        self._file: TextIO = path.open("a", encoding="utf-8")
        if path.stat().st_size:
            self._write({"resumed_from": resumed_from})

    def log(self, data: Mapping[str, float], step: int) -> None:
        self._write({"step": step, "data": {key: _json_number(value) for key, value in data.items()}})

    def log_artifact(self, path: str | Path) -> None:
        """Lies in the file system already."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        path = self.run_dir / "tables" / name / f"step_{step}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = {"columns": list(columns), "data": [list(row) for row in rows]}
        path.write_text(json.dumps(table, ensure_ascii=False, default=str) + "\n", encoding="utf-8")

    def finish(self, status: str) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()


def _drop_torn_line(path: Path) -> None:
    """A process killed while it wrote leaves a last line without its end."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            os.fsync(file.fileno())


def _json_number(value: float) -> float | str:
    """JSON has no NaN and no infinities."""
    return value if math.isfinite(value) else str(value)


def _printable(cell: Any) -> str:
    """One line; control characters (a model can sample those of a terminal) escaped."""
    text = f"{cell:.3f}" if isinstance(cell, float) else str(cell)
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 1] + "…"
