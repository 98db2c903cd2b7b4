"""Backend `mlflow`: a local SQLite file or a server.

While a server does not answer, its records wait in a spool on disk.
"""

from __future__ import annotations

import base64
import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scalerl.tracking.backend import (
    RunInfo,
    TrackingStartError,
    first_line,
    register_backend,
    safe_uri,
)
from scalerl.tracking.chart_sections import with_sections
from scalerl.tracking.mlflow_names import MetricNames, how_to_open, metric_name
from scalerl.tracking.mlflow_run import MlflowRun
from scalerl.tracking.mlflow_store import is_refusal, make_client, send, sqlite_uri
from scalerl.tracking.spool import Record, Spool
from scalerl.tracking.system_metrics import SystemMetrics

logger = logging.getLogger(__name__)

# Seconds between two attempts while the server does not answer.
_RETRY_S = 10.0
# A record is given up after this many attempts if the server answers other requests.
_MAX_ATTEMPTS = 3
SPOOL = "mlflow_spool"
# A PNG of one transparent point.
_NO_IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNgYAAAAAMAASsJTYQAAAAASUVORK5CYII="


@register_backend("mlflow")
class MlflowBackend:
    """Records to one MLflow run: run.run_id or an unfinished one, which is continued, or a new one.

    MLflow's own asynchronous logging would lose records: it drops a batch whose call fails, and its queue is in memory.

    Raises RuntimeError naming the tracking uri, the cause and what to do when the run cannot be opened. Continuing a
    run works even while the server does not answer: the records go to the spool.
    """

    shows_images = True

    def __init__(self, run: RunInfo) -> None:
        self.tracking_uri = run.mlflow_tracking_uri or sqlite_uri(run.run_dir.resolve() / "mlflow.db")
        self._info = run
        # The other half is for requests that are still running at the end of the flush.
        self._flush_timeout_s = run.finish_timeout_s / 2
        # Distinguishes this process' end from that of an earlier process, which may be in the spool.
        self._process = uuid.uuid4().hex
        self._is_away = False
        self._retry_at = 0.0
        self._num_attempts = self._num_refused = 0
        self._last_step = -1
        self._names = MetricNames()
        try:
            self._client = make_client(self.tracking_uri)
            self._run = MlflowRun(self._client, self.tracking_uri, run)
            self._continues = run.run_id is not None or (run.continue_unfinished and self._run.find_unfinished())
            if not self._continues:
                self._run.create()
            self.run_id = self._run.run_id
            self._spool = Spool(run.run_dir / SPOOL / self.run_id)
            if self._continues:
                self._continue()
            self._system = SystemMetrics()
        except Exception as error:
            raise TrackingStartError(
                f"trainer.logger has mlflow, but {safe_uri(self.tracking_uri)} could not be used: "
                f"{first_line(error)}. Correct trainer.mlflow_tracking_uri (null: the variable "
                "MLFLOW_TRACKING_URI, without it an SQLite file in trainer.default_local_dir), or take mlflow out of "
                "trainer.logger"
            ) from error
        _report_other_spools(run.run_dir, self.run_id)

    @property
    def how_to_open(self) -> str | None:
        """What to open to see the run's charts; None while its server has not said where they are."""
        if self._run.experiment is None:
            return None
        return how_to_open(self.tracking_uri, self._run.experiment, self.run_id)

    def log(self, data: Mapping[str, float], step: int, time_s: float) -> None:
        if step > self._last_step:
            self._last_step = step
            data = {**data, **self._system.drain()}
        timestamp_ms = int(time_s * 1000)
        named = {self._names.of(key): value for key, value in with_sections(data).items()}
        record = {"kind": "metrics", "data": named, "step": step, "timestamp_ms": timestamp_ms}
        # A process that resumes from a step validates it again.
        self._submit(record | ({"replaces": True} if self._continues and step == self._info.resumed_from else {}))

    def log_artifact(self, path: Path) -> None:
        """Records a file or directory under its own name."""
        self._submit({"kind": "artifact", "path": str(Path(path).resolve())})

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Records a table as artifact {name}/step_{step}.json, in the form that MLflow shows as a table.

        The form is {"columns": [...], "data": [[...], ...]}. An image is a file beside it. MLflow shows the images of a
        column only where each of its cells has one, so a cell without an image gets a transparent one.
        """
        folder, images = metric_name(name), dict[str, str]()
        of_images = {column for cells in rows for column, value in enumerate(cells) if isinstance(value, bytes)}

        def cell(value: Any, row: int, column: int) -> Any:
            if column not in of_images:
                return value
            file, content = f"{folder}/images/none.png", _NO_IMAGE
            if isinstance(value, bytes):
                file = f"{folder}/images/step_{step}_{row}_{column}.png"
                content = base64.b64encode(value).decode()
            images[file] = content
            return {"type": "image", "filepath": file, "compressed_filepath": file}

        data = [[cell(value, row, column) for column, value in enumerate(cells)] for row, cells in enumerate(rows)]
        table = json.loads(json.dumps({"columns": list(columns), "data": data}, default=str))
        record = {"kind": "table", "file": f"{folder}/step_{step}.json", "table": table}
        self._submit(record | ({"images": images} if images else {}))

    def tag(self, name: str, value: str) -> None:
        """Sets a tag of the run, unless the run has it: a resumed run may say it again."""
        self._submit({"kind": "tag", "name": metric_name(name), "value": value})

    def finish(self, status: str) -> None:
        """Ends the run with status, and delivers waiting records within half of finish_timeout_s."""
        self._system.stop()
        self._submit({"kind": "status", "status": status, "process": self._process})
        if status == "FINISHED":
            self._run.finished()
        deadline = time.monotonic() + self._flush_timeout_s
        while len(self._spool):
            self._deliver()
            if not len(self._spool) or time.monotonic() >= deadline:
                break
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
        if self._num_refused > 1:
            logger.warning("mlflow: %d records were refused", self._num_refused)
        if len(self._spool):
            logger.warning(
                "mlflow: %s did not answer, %d records of run %s wait in %s. Deliver them with: %s",
                safe_uri(self.tracking_uri),
                len(self._spool),
                self.run_id,
                self._spool.directory,
                deliver_command(self._info.run_dir),
            )

    def _continue(self) -> None:
        """Opens the run again, now or when its server answers.  Raises the reason if it cannot be continued."""
        try:
            self._run.resume()
        except Exception as error:
            if is_refusal(error) or self.tracking_uri.startswith("sqlite"):
                raise
            self._went_away(error)
            self._spool.append({"kind": "resume"})
        # Behind what the earlier process recorded, so that the steps which this one does again have no second value.
        self._submit({"kind": "rewind", "first_step": self._info.first_step})

    def _submit(self, record: Record) -> None:
        """Sends a record, or lets it wait behind others.  Raises the server's error if it refuses the record."""
        if not len(self._spool):
            try:
                self._send(record)
                return
            except Exception as error:
                if is_refusal(error):
                    raise
                self._went_away(error)
        if record["kind"] == "artifact":
            record = {**record, "path": str(self._spool.keep(Path(record["path"])))}
        self._spool.append(record)
        if time.monotonic() >= self._retry_at:
            self._deliver()

    def _deliver(self) -> None:
        """Sends waiting records, oldest first, until all are sent or the server does not answer."""
        try:
            self._spool.deliver(self._send_or_give_up)
        except Exception:
            self._retry_at = time.monotonic() + _RETRY_S
            return
        if self._is_away:
            logger.warning("mlflow: %s answers again, all records are there", safe_uri(self.tracking_uri))
        self._is_away = False

    def _send_or_give_up(self, record: Record) -> None:
        """Sends a waiting record, which is given up if it is refused.  Raises the error of a server that is away."""
        try:
            self._send(record)
        except Exception as error:
            if not is_refusal(error):
                self._num_attempts += self._answers()
                if self._num_attempts < _MAX_ATTEMPTS:
                    raise
            self._num_refused += 1
            if self._num_refused == 1:
                logger.warning("mlflow: a record was refused: %s", first_line(error))
        self._num_attempts = 0

    def _send(self, record: Record) -> None:
        if record["kind"] == "resume":
            self._run.resume()
        # A status that an earlier process left in the spool is not the status of this process.
        elif record["kind"] != "status" or record["process"] == self._process:
            send(self._client, self.run_id, record)

    def _answers(self) -> bool:
        try:
            self._client.get_run(self.run_id)
        except Exception:
            return False
        return True

    def _went_away(self, error: Exception) -> None:
        logger.warning(
            "mlflow: %s did not take a record, training continues, records wait in %s until it does: %s",
            safe_uri(self.tracking_uri),
            self._spool.directory,
            first_line(error),
        )
        self._is_away = True
        self._retry_at = time.monotonic() + _RETRY_S


def deliver_command(run_dir: Path) -> str:
    """The command that sends the waiting records of a run to its server."""
    return f"python -m scalerl.tracking.deliver {run_dir} --tracking-uri URI"


def _report_other_spools(run_dir: Path, run_id: str) -> None:
    others = sorted(path.name for path in (run_dir / SPOOL).glob("*") if path.name != run_id)
    if others:
        logger.warning(
            "mlflow: records of earlier runs (%s) wait in %s. Deliver them with: %s",
            ", ".join(others),
            run_dir / SPOOL,
            deliver_command(run_dir),
        )
