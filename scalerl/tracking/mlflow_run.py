"""The run on MLflow's side: its experiment, parameters, tags, description and data sets."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from scalerl.base.files import whole_file
from scalerl.tracking.backend import RunInfo, flat_config, safe_uri
from scalerl.tracking.mlflow_names import metric_name, param_text
from scalerl.tracking.mlflow_store import is_refusal, sqlite_path

if TYPE_CHECKING:
    from mlflow import MlflowClient

# MLflow's pages of the experiment are those for training.
# File in the run's directory while the run is not finished: its id, and where it is.
UNFINISHED = "mlflow_run.json"
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}


class MlflowRun:
    """One MLflow run, which `create` makes or `resume` opens again.

    run_id: "" before it is made.  experiment: id; None while the run's server has not answered.
    """

    def __init__(self, client: MlflowClient, tracking_uri: str, info: RunInfo) -> None:
        self._client, self._tracking_uri, self._info = client, tracking_uri, info
        self._params = {metric_name(key): param_text(value) for key, value in flat_config(info.config).items()}
        self.run_id = info.run_id or ""
        self.experiment: str | None = None

    def create(self) -> None:
        """Makes a run in the experiment of the project's name, which is made too if there is none."""
        name = self._info.experiment_name
        self.experiment = self._experiment_id()
        run = self._client.create_run(self.experiment, tags=_origin_tags(), run_name=name)
        self.run_id = run.info.run_id
        self._write_note()
        self._log_params({})
        self._describe({})
        self._log_datasets()

    def find_unfinished(self) -> bool:
        """Takes the run that an earlier process in the same directory began and did not finish, if it is still there.

        Of a server that does not answer it is believed to be there.
        """
        try:
            note = json.loads((self._info.run_dir / UNFINISHED).read_text(encoding="utf-8"))
            run_id, uri = str(note["run_id"]), note["tracking_uri"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        if uri != self._configured_uri():
            return False
        try:
            if self._client.get_run(run_id).info.lifecycle_stage == "deleted":
                return False
        except Exception as error:
            if is_refusal(error):
                return False
        self.run_id = run_id
        return True

    def finished(self) -> None:
        """Notes that no later process is to continue the run."""
        (self._info.run_dir / UNFINISHED).unlink(missing_ok=True)

    def _write_note(self) -> None:
        note = {"run_id": self.run_id, "tracking_uri": self._configured_uri()}
        with whole_file(self._info.run_dir / UNFINISHED) as file:
            file.write(json.dumps(note).encode() + b"\n")

    def _configured_uri(self) -> str | None:
        """The tracking URI as the user gave it; None without one: the file is in run_dir, wherever that is."""
        uri = self._info.mlflow_tracking_uri
        return None if uri is None else safe_uri(uri)

    def resume(self) -> None:
        """Opens the run again.  Raises ValueError if it is not there, or deleted; the server's error otherwise."""
        from mlflow.exceptions import MlflowException

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
        self.experiment = run.info.experiment_id

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
        if urlsplit(self._tracking_uri).scheme.partition("-")[0] in ("http", "https", "databricks"):
            return None
        if (database := sqlite_path(self._tracking_uri)) is not None:
            return (database.resolve().parent / "mlartifacts").as_uri()
        return (self._info.run_dir.resolve() / "mlartifacts").as_uri()

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
