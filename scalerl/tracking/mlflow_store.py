"""An MLflow store: its client, the records that it gets, their removal, and which errors a retry cannot help."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from scalerl.base.files import fsync, scratch_directory
from scalerl.tracking.mlflow_names import metric_name
from scalerl.tracking.spool import Record

if TYPE_CHECKING:
    from mlflow import MlflowClient

Histories = dict[str, dict[int, dict[str, float]]]
# Statuses that are not due to the record: credentials that can be renewed, time-outs, rate limits.
_RETRIED_STATUSES = (401, 403, 408, 429)


def sqlite_uri(path: Path) -> str:
    """The tracking URI of an SQLite file, whatever characters its path has: a bare `?` would begin options."""
    from sqlalchemy import URL

    return URL.create("sqlite", database=str(path)).render_as_string()


def sqlite_path(tracking_uri: str) -> Path | None:
    """The file that a tracking URI of SQLite names; None for a URI of another kind, or of a database in memory."""
    from sqlalchemy import make_url

    if not tracking_uri.startswith("sqlite:///"):
        return None
    name = make_url(tracking_uri).database
    return None if name in (None, "", ":memory:") else Path(name)


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
    if (path := sqlite_path(tracking_uri)) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if "?" not in tracking_uri and not path.exists():
            _make_database(path)
    return MlflowClient(tracking_uri=tracking_uri)


def _make_database(path: Path) -> None:
    """Makes an SQLite file with MLflow's tables, which is there whole or not at all, and replaces no other.

    MLflow makes the tables in seconds, each for good. One that is killed meanwhile leaves a file that no later one can
    open: it makes the same table or column again, which SQLite refuses.
    """
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{token_hex(4)}.tmp")
    try:
        with scratch_directory("scalerl-mlflow-", Path(tempfile.gettempdir())) as directory:
            made = directory / path.name
            SqlAlchemyStore(sqlite_uri(made), DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH).engine.dispose()
            shutil.copyfile(made, unfinished)
        fsync(unfinished)
        # Another run may have been quicker. Where the file system has no hard links, MLflow makes its tables there.
        with contextlib.suppress(OSError):
            os.link(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def send(client: MlflowClient, run_id: str, record: Record) -> None:
    """Sends a record; sending it again changes nothing, as MLflow keeps equal points (key, step, time, value) once."""
    from mlflow.entities import Metric

    if record["kind"] == "rewind":
        remove_metrics(client, run_id, first_step=record["first_step"])
    elif record["kind"] == "metrics":
        step = record["step"]
        if record.get("replaces"):
            keys = [metric_name(key) for key in record["data"]]
            remove_metrics(client, run_id, first_step=step, last_step=step, keys=keys)
        time_and_step = (record["timestamp_ms"], step)
        metrics = [Metric(metric_name(key), value, *time_and_step) for key, value in record["data"].items()]
        client.log_batch(run_id, metrics=metrics)
    elif record["kind"] == "artifact":
        path = Path(record["path"])
        if path.is_dir():
            client.log_artifacts(run_id, str(path), path.name)
        else:
            client.log_artifact(run_id, str(path))
    elif record["kind"] == "table":
        for file, content in record.get("images", {}).items():
            _send_file(client, run_id, file, base64.b64decode(content))
        client.log_dict(run_id, record["table"], record["file"])
        _list_table(client, run_id, record["file"])
    elif record["kind"] == "tag":
        if record["name"] not in client.get_run(run_id).data.tags:
            client.set_tag(run_id, record["name"], record["value"])
    elif record["kind"] == "status":
        client.set_terminated(run_id, status=record["status"])
    # Opens the run again for the process that recorded it, whose end is a later record.
    elif record["kind"] != "resume":
        raise ValueError(f"record of unknown kind {record['kind']!r}")


def _send_file(client: MlflowClient, run_id: str, file: str, content: bytes) -> None:
    """Sends an artifact.  file: its path in the run."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, Path(file).name)
        path.write_bytes(content)
        client.log_artifact(run_id, str(path), str(Path(file).parent))


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


def is_refusal(error: Exception) -> bool:
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


def remove_metrics(
    client: MlflowClient, run_id: str, *, first_step: int, last_step: int | None = None, keys: Collection[str] = ()
) -> None:
    """Removes the points of a run from first_step to last_step, so that these steps have no two values.

    last_step: None: all behind first_step, too.  keys: of these metrics alone; (): of all.
    Does nothing where the store is no database that this process opens: MLflow's servers have no call for it.
    """
    from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = client._tracking_client.store
    if not isinstance(store, SqlAlchemyStore):
        return

    def chosen(table: type[SqlMetric | SqlLatestMetric]) -> list[Any]:
        limits = [table.run_uuid == run_id, table.step >= first_step]
        if last_step is not None:
            limits.append(table.step <= last_step)
        if keys:
            limits.append(table.key.in_(keys))
        return limits

    with store.ManagedSessionMaker(read_only=False) as session:
        session.query(SqlMetric).filter(*chosen(SqlMetric)).delete(synchronize_session=False)
        # The value that lists of runs show: the last one that is left.
        for latest in session.query(SqlLatestMetric).filter(*chosen(SqlLatestMetric)).all():
            left = session.query(SqlMetric).filter(SqlMetric.run_uuid == run_id, SqlMetric.key == latest.key)
            newest = left.order_by(SqlMetric.step.desc(), SqlMetric.timestamp.desc(), SqlMetric.value.desc()).first()
            if newest is None:
                session.delete(latest)
            else:
                latest.step, latest.timestamp = newest.step, newest.timestamp
                latest.value, latest.is_nan = newest.value, newest.is_nan


def read_histories(tracking_uri: str) -> Histories:
    """Reads all runs of a store: run id -> step -> metrics, the last value where a step has several."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=tracking_uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    histories: Histories = {}
    for run in client.search_runs(experiments):
        steps = histories.setdefault(run.info.run_id, {})
        for key in run.data.metrics:
            for entry in client.get_metric_history(run.info.run_id, key):
                steps.setdefault(entry.step, {})[key] = entry.value
    return histories
