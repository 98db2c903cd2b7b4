"""MLflow in a thread of its own: a slow or failing server costs metrics, never a step."""

from __future__ import annotations

import json
import logging
import os
import posixpath
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

STATUSES = ("FINISHED", "FAILED", "KILLED")
# mlflow.utils.validation: MAX_ENTITY_KEY_LENGTH.
_MAX_NAME = 250
_QUEUE_SIZE = 1000
_FLUSH_TIMEOUT_S = 60.0
_SECRET_KEY = re.compile(
    r"(^|[._])(password|passwd|secret|api_?key|access_?key|private_?key|token|credentials?)$", re.I
)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")


class MlflowBackend:
    """One MLflow run. The constructor returns at once; `wait_started` says whether it worked.

    tracking_uri: None: a SQLite file in run_dir, artifacts beside it.  run_id: the run to continue; None: a new one.
    config: nested mapping, logged as params a.b.c; values of keys that look like secrets are not.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        run_dir: Path,
        *,
        tracking_uri: str | None = None,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        flush_timeout_s: float = _FLUSH_TIMEOUT_S,
    ) -> None:
        self.tracking_uri = tracking_uri or f"sqlite:///{run_dir.resolve() / 'mlflow.db'}"
        self._project_name = project_name
        self._experiment_name = experiment_name
        self._run_dir = run_dir.resolve()
        self._run_id = run_id
        self._params = flat_params(config or {})
        self._flush_timeout_s = flush_timeout_s
        self._queue: queue.Queue[Callable[[MlflowClient, str], None] | None] = queue.Queue(_QUEUE_SIZE)
        self._started = threading.Event()
        self._start_error: Exception | None = None
        self._num_lost = 0
        self._reported = False
        self._finished = False
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)
        self._thread.start()

    def wait_started(self) -> None:
        """Raises RuntimeError naming the tracking uri, the cause and what to do when the run could not be opened."""
        self._started.wait()
        if self._start_error is not None:
            raise RuntimeError(
                f"trainer.logger has mlflow, but {safe_uri(self.tracking_uri)} could not be used: "
                f"{_first_line(self._start_error)}. Correct trainer.mlflow_tracking_uri (null: a SQLite file in "
                "trainer.default_local_dir), or take mlflow out of trainer.logger"
            ) from self._start_error

    @property
    def run_id(self) -> str:
        self.wait_started()
        assert self._run_id is not None
        return self._run_id

    def log(self, data: Mapping[str, float], step: int) -> None:
        timestamp_ms = time.time_ns() // 1_000_000

        def write(client: MlflowClient, run_id: str) -> None:
            from mlflow.entities import Metric

            client.log_batch(run_id, metrics=[Metric(metric_name(k), v, timestamp_ms, step) for k, v in data.items()])

        self._put(write)

    def log_artifact(self, path: str | Path) -> None:
        """A file, or a directory with all it holds, under its own name."""
        path = Path(path)

        def write(client: MlflowClient, run_id: str) -> None:
            if path.is_dir():
                client.log_artifacts(run_id, str(path), artifact_path=path.name)
            else:
                client.log_artifact(run_id, str(path))

        self._put(write)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Artifact {name}/step_{step}.json: {"columns": [...], "data": [[...], ...]}."""
        table = {"columns": list(columns), "data": [list(row) for row in rows]}
        self._put(lambda client, run_id: client.log_dict(run_id, table, f"{metric_name(name)}/step_{step}.json"))

    def finish(self, status: str) -> None:
        """Writes what is queued, within flush_timeout_s, and closes the run with the status. Again: nothing."""
        if self._finished:
            return
        self._finished = True
        self._started.wait()
        if self._start_error is not None:
            return
        deadline = time.monotonic() + self._flush_timeout_s
        try:
            for last in (lambda client, run_id: client.set_terminated(run_id, status=status), None):
                self._queue.put(last, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning(
                "mlflow: %s did not take everything within %.0f s, metrics are lost, the run stays RUNNING there",
                safe_uri(self.tracking_uri),
                self._flush_timeout_s,
            )
        if self._num_lost:
            logger.warning("mlflow: %d writes were lost in this run", self._num_lost)

    def _put(self, write: Callable[[MlflowClient, str], None]) -> None:
        if self._finished:
            return
        try:
            self._queue.put_nowait(write)
        except queue.Full:
            self._lost(f"{_QUEUE_SIZE} writes wait already: the server is too slow")

    def _lost(self, cause: str) -> None:
        self._num_lost += 1
        if not self._reported:
            self._reported = True
            logger.warning(
                "mlflow: a write to %s failed, training goes on, later failures are only counted: %s",
                safe_uri(self.tracking_uri),
                cause,
            )

    def _run(self) -> None:
        try:
            client = self._open()
        except Exception as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        assert self._run_id is not None
        while (write := self._queue.get()) is not None:
            try:
                write(client, self._run_id)
            except Exception as error:
                self._lost(_first_line(error))

    def _open(self) -> MlflowClient:
        # MLflow reads these when it is imported or at the request; a user's own value wins.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # A wrong address is reported soon, not after seven retries of two minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        from mlflow import MlflowClient

        logging.getLogger("alembic").setLevel(logging.WARNING)
        # It logs the making of tables, and a traceback for every failed write, which is reported here already.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        if self.tracking_uri.startswith("sqlite:///"):
            Path(self.tracking_uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        client = MlflowClient(tracking_uri=self.tracking_uri)
        if self._run_id is None:
            run = client.create_run(self._experiment_id(client), tags=_origin_tags(), run_name=self._experiment_name)
            self._run_id = run.info.run_id
            self._log_params(client, {})
        else:
            self._resume(client)
        return client

    def _experiment_id(self, client: MlflowClient) -> str:
        from mlflow.exceptions import MlflowException

        experiment = client.get_experiment_by_name(self._project_name)
        if experiment is None:
            try:
                return client.create_experiment(self._project_name, artifact_location=self._artifact_location())
            except MlflowException:
                # Another run may have made it in between.
                experiment = client.get_experiment_by_name(self._project_name)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage == "deleted":
            raise ValueError(
                f"experiment {self._project_name!r} is deleted there: restore it with `mlflow experiments restore "
                f"-x {experiment.experiment_id}`, or choose another trainer.project_name"
            )
        return experiment.experiment_id

    def _artifact_location(self) -> str | None:
        """None where a server decides."""
        if urlsplit(self.tracking_uri).scheme.partition("-")[0] in ("http", "https", "databricks"):
            return None
        if self.tracking_uri.startswith("sqlite:///"):
            return (Path(self.tracking_uri.removeprefix("sqlite:///")).resolve().parent / "mlartifacts").as_uri()
        return (self._run_dir / "mlartifacts").as_uri()

    def _resume(self, client: MlflowClient) -> None:
        from mlflow.exceptions import MlflowException

        assert self._run_id is not None
        try:
            run = client.get_run(self._run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise ValueError(
                f"the checkpoint belongs to MLflow run {self._run_id}, which is not there: set "
                "trainer.mlflow_tracking_uri to where the run began"
            ) from error
        if run.info.lifecycle_stage == "deleted":
            raise ValueError(
                f"MLflow run {self._run_id} of the checkpoint is deleted there: restore it with "
                f"`mlflow runs restore --run-id {self._run_id}`"
            )
        client.update_run(self._run_id, status="RUNNING")
        self._log_params(client, run.data.params)

    def _log_params(self, client: MlflowClient, known: Mapping[str, str]) -> None:
        """MLflow refuses another value for a param: what a resumed run changed becomes a tag changed.{param}."""
        from mlflow.entities import Param, RunTag
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        short = {key: value[:MAX_PARAM_VAL_LENGTH] for key, value in self._params.items()}
        changed = {key: value for key, value in short.items() if key in known and known[key] != value}
        assert self._run_id is not None
        client.log_batch(
            self._run_id,
            params=[Param(key, value) for key, value in short.items() if key not in known],
            tags=[RunTag(metric_name(f"changed.{key}"), value) for key, value in changed.items()],
        )


def metric_name(key: str) -> str:
    """The key as MLflow accepts it (mlflow.utils.validation): `@` as _at_, other foreign characters as _."""
    name = re.sub(r"[^/\w.\- :]", "_", key.replace("@", "_at_"))
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    return posixpath.join(*parts)[:_MAX_NAME].rstrip("/") if parts else "_"


def flat_params(config: Mapping[str, Any]) -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}; lists as JSON; secrets as ***."""
    found: dict[str, str] = {}

    def visit(key: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                visit(f"{key}.{name}" if key else str(name), inner)
        elif isinstance(value, list | tuple) and any(isinstance(inner, Mapping) for inner in value):
            for index, inner in enumerate(value):
                visit(f"{key}.{index}", inner)
        elif _SECRET_KEY.search(key) and isinstance(value, str) and value:
            found[metric_name(key)] = "***"
        else:
            text = json.dumps(value, default=str) if isinstance(value, list | tuple | Mapping) else str(value)
            found[metric_name(key)] = safe_uri(text)

    visit("", dict(config))
    return found


def safe_uri(text: str) -> str:
    """Without user and password of the URIs in it."""
    return _USERINFO.sub("***@", text)


def _origin_tags() -> dict[str, str]:
    import getpass

    from mlflow.utils.mlflow_tags import MLFLOW_SOURCE_NAME, MLFLOW_SOURCE_TYPE, MLFLOW_USER

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a user id without a name.
        user = str(os.getuid())
    return {MLFLOW_USER: user, MLFLOW_SOURCE_NAME: "scalerl", MLFLOW_SOURCE_TYPE: "LOCAL"}


def _first_line(error: Exception) -> str:
    # SQLAlchemy puts advice about autoflush above the cause.
    lines = [line for line in str(error).splitlines() if line.strip() and "(raised as a result of" not in line]
    return safe_uri(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)
