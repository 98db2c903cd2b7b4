"""`Tracking`, which logs to every configured backend, none of which can stop a step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from scalerl.tracking.backend import (
    STATUSES,
    Backend,
    RunInfo,
    check_backends,
    first_line,
    opener_of,
)
from scalerl.tracking.channel import QUEUE_SIZE, START_TIMEOUT_S, Channel
from scalerl.tracking.console import ConsoleBackend
from scalerl.tracking.jsonl import FileBackend
from scalerl.tracking.metrics.metric import Metric
from scalerl.tracking.mlflow_backend import MlflowBackend
from scalerl.tracking.timeline import Span

logger = logging.getLogger(__name__)

# How long a checkpoint's commit waits for the backends.
FLUSH_LIMIT_S = 5.0


class Tracking:
    """Logs a run's metrics, tables and files to every configured backend.

    default_backend: a registered name or names.  config: the run's configuration as nested mapping.
    run_dir: directory for the files of this run, created if missing.
    wait: False returns while backends are still being opened; `wait_started` or the first log then raises a failure.
    queue_size, start_timeout_s: for each backend.
    facts: the other fields of `RunInfo`; without mlflow_tracking_uri the variable MLFLOW_TRACKING_URI counts.
    Raises ValueError for an unknown backend or one that is not installed, RuntimeError or OSError with the cause when a
    backend cannot start. A backend that later fails or hangs is reported once and its losses are counted; the others
    continue.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Mapping[str, Any] | None = None,
        *,
        run_dir: str | Path,
        wait: bool = True,
        queue_size: int = QUEUE_SIZE,
        start_timeout_s: float = START_TIMEOUT_S,
        **facts: Any,
    ) -> None:
        names = [default_backend] if isinstance(default_backend, str) else list(dict.fromkeys(default_backend))
        check_backends(names)
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        facts["mlflow_tracking_uri"] = facts.get("mlflow_tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or None
        info = RunInfo(project_name, experiment_name, run_dir, config=config or {}, **facts)
        self._finish_timeout_s = info.finish_timeout_s
        self._unloggable: set[str] = set()
        self._num_console_failures = 0
        self._started = False
        self._finished = False
        self._console: ConsoleBackend | None = None
        self._channels = {
            name: Channel(
                name,
                partial(opener_of(name), info),
                queue_size=queue_size,
                start_timeout_s=start_timeout_s,
            )
            for name in names
            if name != "console"
        }
        try:
            if wait:
                self.wait_started()
            # Opened last, as its panel would hide the message of a backend that does not start.
            if "console" in names:
                self._console = ConsoleBackend(info)
        except BaseException:
            self._close_all("FAILED")
            raise

    @property
    def logger(self) -> dict[str, Backend]:
        """The backends by name; waits until all are open."""
        opened = {name: channel.wait_started() for name, channel in self._channels.items()}
        return opened if self._console is None else {**opened, "console": self._console}

    def wait_started(self) -> None:
        """Waits until all backends are open.  Raises the error of one that could not be opened."""
        if not self._started:
            for channel in self._channels.values():
                channel.wait_started()
            self._started = True

    @property
    def run_id(self) -> str | None:
        """The id of the MLflow run; None without mlflow. Waits until the run is open."""
        mlflow = self._mlflow()
        return None if mlflow is None else mlflow.run_id

    @property
    def tracking_uri(self) -> str | None:
        """The URI where MLflow's runs are stored; None without mlflow."""
        mlflow = self._mlflow()
        return None if mlflow is None else mlflow.tracking_uri

    @property
    def how_to_open(self) -> str | None:
        """What to open to see the run's charts in MLflow; None without mlflow, or if it is not known yet."""
        mlflow = self._mlflow()
        return None if mlflow is None else mlflow.how_to_open

    def log(self, data: Mapping[str, Metric | float], step: int, backend: str | Sequence[str] | None = None) -> None:
        """Logs the metrics of a step.  backend: names of the backends to log to; default: all.

        A value that is not a number is left out, with one warning per key.
        """
        self.wait_started()
        numbers, time_s = self._numbers(data), time.time()
        only = None if backend is None else {backend} if isinstance(backend, str) else set(backend)
        self._each(lambda each: each.log(numbers, step, time_s), only)

    def log_artifact(self, path: str | Path) -> None:
        """Logs a file or directory to the backends that keep files (mlflow, wandb); it is read later, in a thread."""
        self._each(lambda each: each.log_artifact(Path(path)))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Logs a table of texts, numbers and images, which are bytes; the only call that gives prompts and responses to
        a backend."""
        columns, rows = list(columns), [list(row) for row in rows]
        plain = [["<image>" if isinstance(cell, bytes) else cell for cell in row] for row in rows]
        self._each(
            lambda each: each.log_table(name, columns, rows if getattr(each, "shows_images", False) else plain, step)
        )

    @property
    def has_timeline(self) -> bool:
        """Whether a backend keeps what `log_timeline` gets."""
        return "file" in self._channels

    def log_timeline(self, spans: Iterable[Span], step: int) -> None:
        """Logs who did what in a step; only `file` keeps it, in timeline.jsonl."""
        if (channel := self._channels.get("file")) is not None and not self._finished:
            kept = sorted(spans, key=lambda span: span.begin_s)
            channel.put(lambda backend: cast(FileBackend, backend).log_timeline(kept, step))

    def tag(self, name: str, value: str) -> None:
        """Sets a tag of the MLflow run; other backends have none."""
        if (channel := self._channels.get("mlflow")) is not None and not self._finished:
            channel.put(lambda backend: cast(MlflowBackend, backend).tag(name, value))

    def phase(self, name: str) -> None:
        """Tells the progress display the phase that the run is in now."""
        if self._console is not None:
            self._on_console(lambda console: console.progress.phase(name))

    def message(self, text: str) -> None:
        """Prints a line on the console; without that backend it goes to the log."""
        if self._console is not None:
            self._on_console(lambda console: console.progress.message(text))
        else:
            logger.info("%s", text)

    def flush(self, limit_s: float = FLUSH_LIMIT_S) -> None:
        """Waits until every backend has what was logged so far, at most limit_s: a backend that hangs stops no run."""
        deadline = time.monotonic() + limit_s
        for channel in self._channels.values():
            channel.flush(deadline)

    def finish(self, status: str = "FINISHED") -> None:
        """Writes pending records, within finish_timeout_s, and ends; a second call does nothing.

        status: FINISHED | FAILED | KILLED.
        """
        if status not in STATUSES:
            raise ValueError(f"Tracking.finish: status {status!r}, use one of {', '.join(STATUSES)}")
        if not self._finished:
            self._close_all(status)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)
        self.finish("FINISHED" if kind is None else "KILLED" if stopped else "FAILED")

    def _mlflow(self) -> MlflowBackend | None:
        if "mlflow" not in self._channels:
            return None
        backend = self._channels["mlflow"].wait_started()
        assert isinstance(backend, MlflowBackend)
        return backend

    def _close_all(self, status: str) -> None:
        self._finished = True
        # The console ends first, so that warnings of the others appear below its last line, not inside the panel.
        if self._console is not None:
            self._on_console(lambda console: console.finish(status))
            if self._num_console_failures > 1:
                logger.warning("tracking backend 'console': %d writes failed", self._num_console_failures)
        deadline = time.monotonic() + self._finish_timeout_s
        for channel in self._channels.values():
            channel.close(status)
        for channel in self._channels.values():
            channel.join(deadline)

    def _each(self, call: Callable[[Backend], None], only: set[str] | None = None) -> None:
        if self._finished:
            return
        for name, channel in self._channels.items():
            if only is None or name in only:
                channel.put(call)
        if self._console is not None and (only is None or "console" in only):
            self._on_console(call)

    def _on_console(self, call: Callable[[ConsoleBackend], None]) -> None:
        assert self._console is not None
        try:
            call(self._console)
        except Exception as error:
            self._num_console_failures += 1
            if self._num_console_failures == 1:
                logger.warning("tracking backend 'console': a write failed, training continues: %s", first_line(error))

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
