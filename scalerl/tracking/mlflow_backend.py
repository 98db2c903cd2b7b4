"""Backend `mlflow`: a local SQLite file or a server.

While a server does not answer, its records wait in a spool on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import posixpath
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from scalerl.tracking import mlflow_pages, plots
from scalerl.tracking.backend import (
    RunInfo,
    TrackingStartError,
    first_line,
    flat_config,
    register_backend,
    safe_uri,
)
from scalerl.tracking.chart_sections import with_sections
from scalerl.tracking.spool import Record, Spool
from scalerl.tracking.system_metrics import SystemMetrics

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

# mlflow.utils.validation: MAX_ENTITY_KEY_LENGTH.
_MAX_NAME = 250
_MAX_BACKOFF_S = 30.0
# A record is given up after this many attempts if the server answers other requests.
_MAX_ATTEMPTS = 3
# Statuses that are not due to the record: credentials that can be renewed, time-outs, rate limits.
_RETRIED_STATUSES = (401, 403, 408, 429)
SPOOL = "mlflow_spool"
# MLflow's pages of the experiment are those for training.
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}


@register_backend("mlflow")
class MlflowBackend:
    """Records to one MLflow run: run.run_id if that is set, which is continued, or a new one.

    Raises RuntimeError naming the tracking uri, the cause and what to do when the run cannot be opened. Continuing a
    run works even while the server does not answer: the records go to the spool.
    """

    def __init__(self, run: RunInfo) -> None:
        self.tracking_uri = run.mlflow_tracking_uri or f"sqlite:///{run.run_dir.resolve() / 'mlflow.db'}"
        self._info = run
        self._params = {metric_name(key): param_text(value) for key, value in flat_config(run.config).items()}
        # The other half is for requests that are still running at the end of the flush.
        self._flush_timeout_s = run.finish_timeout_s / 2
        # Distinguishes this process' end from that of an earlier process, which may be in the spool.
        self._process = uuid.uuid4().hex
        self._retry_at = 0.0
        self._backoff_s = 0.0
        self._num_attempts = 0
        self._last_step = -1
        self._names = MetricNames()
        self._resume_pending = False
        # None: the run's server has not answered yet.
        self._experiment: str | None = None
        try:
            self._client = make_client(self.tracking_uri)
            self.run_id = run.run_id or self._create()
            self._spool = Spool(run.run_dir / SPOOL / self.run_id)
            if run.run_id is not None:
                self._continue()
            self._system = SystemMetrics()
        except Exception as error:
            raise TrackingStartError(
                f"trainer.logger has mlflow, but {safe_uri(self.tracking_uri)} could not be used: "
                f"{first_line(error)}. Correct trainer.mlflow_tracking_uri (null: a SQLite file in "
                "trainer.default_local_dir), or take mlflow out of trainer.logger"
            ) from error
        _report_other_spools(run.run_dir, self.run_id)

    @property
    def how_to_open(self) -> str | None:
        """What to open to see the run's charts; None while its server has not said where they are."""
        if self._experiment is None:
            return None
        return mlflow_pages.how_to_open(self.tracking_uri, self._experiment, self.run_id)

    def log(self, data: Mapping[str, float], step: int, time_s: float) -> None:
        if step > self._last_step:
            self._last_step = step
            data = {**data, **self._system.drain()}
        timestamp_ms = int(time_s * 1000)
        named = {self._names.of(key): value for key, value in with_sections(data).items()}
        self._submit({"kind": "metrics", "data": named, "step": step, "timestamp_ms": timestamp_ms})

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Records a file or directory under its own name, in a folder of the run's artifacts."""
        self._submit({"kind": "artifact", "path": str(Path(path).resolve()), "folder": folder})

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Records a table as artifact {name}/step_{step}.json, in the form that MLflow shows as a table.

        The form is {"columns": [...], "data": [[...], ...]}.
        """
        table = {"columns": list(columns), "data": [list(row) for row in rows]}
        table = json.loads(json.dumps(table, default=str))
        self._submit({"kind": "table", "file": f"{metric_name(name)}/step_{step}.json", "table": table})

    def finish(self, status: str) -> None:
        """Delivers waiting records within half of finish_timeout_s, draws the curves, and ends the run with status."""
        self._system.stop()
        deadline = time.monotonic() + self._flush_timeout_s
        self._flush(deadline)
        if not len(self._spool):
            self._log_plots()
        self._submit({"kind": "status", "status": status, "process": self._process})
        self._flush(deadline)
        if len(self._spool):
            logger.warning(
                "mlflow: %s did not answer, %d records of run %s wait in %s. Deliver them with: %s",
                safe_uri(self.tracking_uri),
                len(self._spool),
                self.run_id,
                self._spool.directory,
                deliver_command(self._info.run_dir),
            )

    def deliver(self) -> None:
        """Sends waiting records, oldest first, until all are sent or the server does not answer.

        Raises the server's error if it refuses a record, which is then given up.
        """
        if len(self._spool) and not self._resumed():
            return
        while len(self._spool):
            try:
                self._send(self._spool.head())
            except Exception as error:
                if not _is_refusal(error):
                    self._num_attempts += self._answers()
                    if self._num_attempts < _MAX_ATTEMPTS:
                        self._back_off()
                        return
                self._num_attempts = 0
                self._spool.pop()
                raise
            self._num_attempts = 0
            self._spool.pop()
        if self._backoff_s:
            logger.warning("mlflow: %s answers again, all records are there", safe_uri(self.tracking_uri))
        self._backoff_s = self._retry_at = 0.0

    def _submit(self, record: Record) -> None:
        if len(self._spool) == 0 and not self._resume_pending:
            try:
                self._send(record)
                return
            except Exception as error:
                if _is_refusal(error):
                    raise
                self._went_away(error)
        if record["kind"] == "artifact":
            record = {**record, "path": str(self._spool.keep(Path(record["path"])))}
        self._spool.append(record)
        if time.monotonic() >= self._retry_at:
            self.deliver()

    def _send(self, record: Record) -> None:
        # A status that an earlier process left in the spool is not the status of this process.
        if record["kind"] != "status" or record["process"] == self._process:
            send(self._client, self.run_id, record)

    def _resumed(self) -> bool:
        """True if the run is open.  Raises the reason if it cannot be continued; the records are kept."""
        try:
            self._resume_if_pending()
        except Exception as error:
            if _is_refusal(error):
                raise
            self._back_off()
            return False
        return True

    def _went_away(self, error: Exception) -> None:
        logger.warning(
            "mlflow: %s did not take a record, training continues, records wait in %s until it does: %s",
            safe_uri(self.tracking_uri),
            self._spool.directory,
            first_line(error),
        )
        self._back_off()

    def _back_off(self) -> None:
        self._backoff_s = min(_MAX_BACKOFF_S, max(1.0, 2 * self._backoff_s))
        self._retry_at = time.monotonic() + self._backoff_s

    def _answers(self) -> bool:
        try:
            self._client.get_run(self.run_id)
        except Exception:
            return False
        return True

    def _flush(self, deadline: float) -> None:
        num_refused = 0
        while len(self._spool):
            try:
                self.deliver()
            except Exception as error:
                num_refused += 1
                if num_refused == 1:
                    logger.warning("mlflow: a record was refused: %s", first_line(error))
                if self._resume_pending:
                    break
                continue
            if len(self._spool) and time.monotonic() >= deadline:
                break
            if len(self._spool):
                time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
        if num_refused > 1:
            logger.warning("mlflow: %d records were refused", num_refused)

    def _log_plots(self) -> None:
        path = self._info.run_dir / "plots" / "curves.png"
        try:
            keys = plots.keys_to_plot(list(self._client.get_run(self.run_id).data.metrics))
            history = {key: self._client.get_metric_history(self.run_id, key) for key in keys}
            curves = {
                key: [(point.step, point.value) for point in sorted(points, key=lambda point: point.timestamp)]
                for key, points in history.items()
            }
            drawn = plots.draw(curves, path, f"{self._info.project_name} / {self._info.experiment_name}")
        except Exception as error:
            # A run without its picture is still complete.
            logger.warning("mlflow: the curves were not drawn: %s", first_line(error))
            return
        if drawn:
            self.log_artifact(path, "plots")

    def _create(self) -> str:
        name = self._info.experiment_name
        self._experiment = self._experiment_id()
        run = self._client.create_run(self._experiment, tags=_origin_tags(), run_name=name)
        self.run_id = run.info.run_id
        self._log_params({})
        self._describe({})
        self._log_datasets()
        return self.run_id

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        client, name = self._client, self._info.project_name
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            try:
                location = self._artifact_location()
                return client.create_experiment(name, artifact_location=location, tags=EXPERIMENT_TAGS)
            except MlflowException:
                # Another run may have created it in the meantime.
                experiment = client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage == "deleted":
            raise ValueError(
                f"experiment {name!r} is deleted there: restore it with `mlflow experiments restore "
                f"-x {experiment.experiment_id}`, or choose another trainer.project_name"
            )
        return experiment.experiment_id

    def _artifact_location(self) -> str | None:
        """URI of the folder for artifacts; None if a server decides."""
        if urlsplit(self.tracking_uri).scheme.partition("-")[0] in ("http", "https", "databricks"):
            return None
        if self.tracking_uri.startswith("sqlite:///"):
            return (Path(self.tracking_uri.removeprefix("sqlite:///")).resolve().parent / "mlartifacts").as_uri()
        return (self._info.run_dir.resolve() / "mlartifacts").as_uri()

    def _continue(self) -> None:
        self._resume_pending = True
        try:
            self._resume_if_pending()
        except Exception as error:
            if _is_refusal(error) or self.tracking_uri.startswith("sqlite"):
                raise
            self._went_away(error)
            return
        # Delivers what an earlier process left there.
        with contextlib.suppress(Exception):
            self.deliver()

    def _resume_if_pending(self) -> None:
        from mlflow.exceptions import MlflowException

        if not self._resume_pending:
            return
        try:
            run = self._client.get_run(self.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise ValueError(
                f"the checkpoint belongs to MLflow run {self.run_id}, which is not there: set "
                "trainer.mlflow_tracking_uri to where the run began"
            ) from error
        if run.info.lifecycle_stage == "deleted":
            raise ValueError(
                f"MLflow run {self.run_id} of the checkpoint is deleted there: restore it with "
                f"`mlflow runs restore --run-id {self.run_id}`"
            )
        self._client.update_run(self.run_id, status="RUNNING")
        self._log_params(run.data.params)
        self._describe(run.data.tags)
        self._experiment = run.info.experiment_id
        self._resume_pending = False

    def _describe(self, known: Mapping[str, str]) -> None:
        """Sets the run's tags, and its description unless it has one, which somebody may have edited."""
        from mlflow.entities import RunTag
        from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE
        from mlflow.utils.validation import MAX_TAG_VAL_LENGTH

        tags = {metric_name(key): value for key, value in self._info.tags.items()}
        if self._info.description and MLFLOW_RUN_NOTE not in known:
            tags[MLFLOW_RUN_NOTE] = self._info.description
        self._client.log_batch(
            self.run_id, tags=[RunTag(key, safe_uri(value)[:MAX_TAG_VAL_LENGTH]) for key, value in tags.items()]
        )

    def _log_datasets(self) -> None:
        """Names the run's files as its data sets, with a digest of their sizes and times."""
        from mlflow.entities import Dataset, DatasetInput, InputTag
        from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

        inputs = [
            DatasetInput(
                Dataset(Path(path).name, _file_digest(path), "local", json.dumps({"uri": safe_uri(path)})),
                [InputTag(MLFLOW_DATASET_CONTEXT, context)],
            )
            for context, paths in self._info.datasets.items()
            for path in paths
        ]
        if inputs:
            self._client.log_inputs(self.run_id, inputs)

    def _log_params(self, known: Mapping[str, str]) -> None:
        """Logs the parameters that MLflow does not have yet.

        MLflow refuses a new value for a parameter, so one that a resumed run changed becomes a tag changed.{param}.
        """
        from mlflow.entities import Param, RunTag
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        short = {key: value[:MAX_PARAM_VAL_LENGTH] for key, value in self._params.items()}
        changed = {key: value for key, value in short.items() if key in known and known[key] != value}
        self._client.log_batch(
            self.run_id,
            params=[Param(key, value) for key, value in short.items() if key not in known],
            tags=[RunTag(metric_name(f"changed.{key}"), value) for key, value in changed.items()],
        )


def send(client: MlflowClient, run_id: str, record: Record) -> None:
    """Sends a record; sending it again changes nothing, as MLflow keeps equal points (key, step, time, value) once."""
    from mlflow.entities import Metric

    if record["kind"] == "metrics":
        time_and_step = (record["timestamp_ms"], record["step"])
        metrics = [Metric(metric_name(key), value, *time_and_step) for key, value in record["data"].items()]
        client.log_batch(run_id, metrics=metrics)
    elif record["kind"] == "artifact":
        path = Path(record["path"])
        if path.is_dir():
            client.log_artifacts(run_id, str(path), posixpath.join(record["folder"] or "", path.name))
        else:
            client.log_artifact(run_id, str(path), record["folder"])
    elif record["kind"] == "table":
        client.log_dict(run_id, record["table"], record["file"])
        _list_table(client, run_id, record["file"])
    elif record["kind"] == "status":
        client.set_terminated(run_id, status=record["status"])
    else:
        raise ValueError(f"record of unknown kind {record['kind']!r}")


def _list_table(client: MlflowClient, run_id: str, file: str) -> None:
    """Adds a table to the tag by which MLflow's pages find tables; drops its oldest entries if it is full."""
    from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS
    from mlflow.utils.validation import MAX_TAG_VAL_LENGTH

    tables = json.loads(client.get_run(run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
    entry = {"path": file, "type": "table"}
    tables = [*(each for each in tables if each != entry), entry]
    while len(json.dumps(tables)) > MAX_TAG_VAL_LENGTH:
        del tables[0]
    client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps(tables))


class MetricNames:
    """Distinct MLflow names of metric keys, also of keys that `metric_name` makes equal (a@b and a_at_b)."""

    def __init__(self) -> None:
        # Keys by their names.
        self._keys: dict[str, str] = {}

    def of(self, key: str) -> str:
        """The name of a key: its `metric_name`, or that with a digest of the key appended if it is taken."""
        name = metric_name(key)
        owner = self._keys.setdefault(name, key)
        if owner == key:
            return name
        digest = hashlib.sha256(key.encode()).hexdigest()[:8]
        own = f"{name[: _MAX_NAME - 9]}_{digest}"
        if own not in self._keys:
            self._keys[own] = key
            logger.warning("mlflow: the metrics %r and %r have one name there; the second is %r", owner, key, own)
        return own


def metric_name(key: str) -> str:
    """The key as a name that MLflow accepts (mlflow.utils.validation): `@` as _at_, other invalid characters as _."""
    name = re.sub(r"[^/\w.\- :]", "_", key.replace("@", "_at_"))
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    return posixpath.join(*parts)[:_MAX_NAME].rstrip("/") if parts else "_"


def param_text(value: Any) -> str:
    """A configuration value as text; lists and mappings as JSON."""
    return safe_uri(json.dumps(value, default=str) if isinstance(value, list | tuple | Mapping) else str(value))


def deliver_command(run_dir: Path) -> str:
    """The command that sends the waiting records of a run to its server."""
    return f"python -m scalerl.tracking.deliver {run_dir} --tracking-uri URI"


def make_client(tracking_uri: str) -> MlflowClient:
    """Makes an MLflow client, with scalerl's defaults for MLflow's environment variables and loggers."""
    # MLflow reads these when it is imported or at the request; a user's own value wins.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # A wrong address is reported soon, not after seven retries of two minutes; the spool covers a server that is down.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    from mlflow import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)
    # This module logs the creation of tables, and a traceback for every failed write, which is reported here already.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    # MLflow would print a link at a run's end, to its pages for GenAI applications.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    # One line per retry.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    if tracking_uri.startswith("sqlite:///"):
        Path(tracking_uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    return MlflowClient(tracking_uri=tracking_uri)


def _is_refusal(error: Exception) -> bool:
    """True if a retry cannot help: the server has refused the record, or the record itself is bad."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
    elif isinstance(error, OSError):
        # Errors of the package requests are OSErrors; its HTTPError has the response.
        response = getattr(error, "response", None)
        if response is None:
            return isinstance(error, FileNotFoundError)
        status = response.status_code
    else:
        return True
    return 400 <= status < 500 and status not in _RETRIED_STATUSES


def _report_other_spools(run_dir: Path, run_id: str) -> None:
    others = sorted(path.name for path in (run_dir / SPOOL).glob("*") if path.name != run_id)
    if others:
        logger.warning(
            "mlflow: records of earlier runs (%s) wait in %s. Deliver them with: %s",
            ", ".join(others),
            run_dir / SPOOL,
            deliver_command(run_dir),
        )


def _file_digest(path: str) -> str:
    """A digest of a file's path, size and time of change, not of its bytes, which may be many; of a URL, its text."""
    try:
        status = os.stat(path)
        facts = f"{status.st_size} {status.st_mtime_ns}"
    except OSError:
        facts = ""
    return hashlib.sha256(f"{path} {facts}".encode()).hexdigest()[:8]


def _origin_tags() -> dict[str, str]:
    import getpass

    from mlflow.utils.mlflow_tags import MLFLOW_SOURCE_NAME, MLFLOW_SOURCE_TYPE, MLFLOW_USER

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a user id without a name.
        user = str(os.getuid())
    return {MLFLOW_USER: user, MLFLOW_SOURCE_NAME: "scalerl", MLFLOW_SOURCE_TYPE: "LOCAL"}
