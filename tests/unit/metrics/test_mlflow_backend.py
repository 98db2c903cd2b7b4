from __future__ import annotations

import json
import logging
import shutil
import socket
import sqlite3
import threading
from pathlib import Path

import pytest
from mlflow import MlflowClient

from scalerl.metrics import Metric, Tracking
from scalerl.metrics.mlflow_backend import MlflowBackend, flat_params, metric_name, safe_uri


@pytest.fixture(scope="module")
def empty_db(tmp_path_factory) -> Path:
    """Making MLflow's tables takes seconds: once, and copied into each run directory."""
    run_dir = tmp_path_factory.mktemp("mlflow")
    MlflowClient(f"sqlite:///{run_dir}/mlflow.db").search_experiments()
    return run_dir / "mlflow.db"


@pytest.fixture
def run_dir(tmp_path, empty_db) -> Path:
    shutil.copy(empty_db, tmp_path / "mlflow.db")
    return tmp_path


def client(run_dir: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{run_dir}/mlflow.db")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record for record in caplog.records if record.name.startswith("scalerl")]
    return [record.getMessage() for record in found if record.levelno >= logging.WARNING]


def test_a_run_from_nothing_is_complete(tmp_path, capfd):
    run_dir = tmp_path / "new" / "run"
    config = {"trainer": {"nnodes": 2, "logger": ["mlflow"]}, "empty": {}, "none": None}
    with Tracking("project", "first try", "mlflow", config, run_dir=run_dir) as tracking:
        tracking.log({"actor/pg_loss": Metric(0.5, "mean"), "val-core/a/b/reward/mean@4": 0.25}, step=3)
        tracking.log({"actor/pg_loss": 0.25}, step=4)
        (tmp_path / "resolved.yaml").write_text("a: 1")
        tracking.log_artifact(tmp_path / "resolved.yaml")
        run_id = tracking.run_id
    run = client(run_dir).get_run(run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == "first try"
    assert client(run_dir).get_experiment(run.info.experiment_id).name == "project"
    assert run.data.params == {"trainer.nnodes": "2", "trainer.logger": '["mlflow"]', "empty": "{}", "none": "None"}
    history = client(run_dir).get_metric_history(run_id, "actor/pg_loss")
    assert [(point.step, point.value) for point in history] == [(3, 0.5), (4, 0.25)]
    assert run.data.metrics["val-core/a/b/reward/mean_at_4"] == 0.25
    assert [path.name for path in (run_dir / "mlartifacts").rglob("*.yaml")] == ["resolved.yaml"]
    # Neither migrations nor tips of MLflow on the user's terminal.
    assert capfd.readouterr() == ("", "")


def test_resume_continues_the_same_run(run_dir):
    first = Tracking("p", "e", "mlflow", {"lr": 1.0, "seed": 7}, run_dir=run_dir)
    run_id = first.run_id
    for step in (1, 2, 3):
        first.log({"x": step}, step)
    first.finish("FAILED")
    second = Tracking("p", "e", "mlflow", {"lr": 2.0, "seed": 7, "new": 1}, run_dir=run_dir, run_id=run_id)
    assert second.run_id == run_id
    assert client(run_dir).get_run(run_id).info.status == "RUNNING"
    for step in (3, 4):
        second.log({"x": 10 * step}, step)
    second.finish()
    run = client(run_dir).get_run(run_id)
    points = client(run_dir).get_metric_history(run_id, "x")
    assert [(point.step, point.value) for point in points] == [(1, 1), (2, 2), (3, 3), (3, 30), (4, 40)]
    assert run.info.status == "FINISHED"
    # MLflow refuses a second value for a param: the change is a tag, and the run goes on.
    assert run.data.params == {"lr": "1.0", "seed": "7", "new": "1"}
    assert run.data.tags["changed.lr"] == "2.0" and "changed.seed" not in run.data.tags
    assert len(client(run_dir).search_runs([run.info.experiment_id])) == 1


@pytest.mark.parametrize(("error", "status"), [(None, "FINISHED"), (KeyError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_the_status_says_how_the_run_ended(run_dir, error, status):
    tracking = Tracking("p", "e", "mlflow", run_dir=run_dir)
    try:
        with tracking:
            if error is not None:
                raise error
    except BaseException as raised:
        assert type(raised) is error
    assert client(run_dir).get_run(tracking.run_id).info.status == status


def test_a_table_is_an_artifact_and_the_only_way_for_text(run_dir):
    with Tracking("p", "e", "mlflow", run_dir=run_dir) as tracking:
        tracking.log_table("val/generations", ["prompt", "score"], [["2+2=", 1.0]], step=5)
    path = next((run_dir / "mlartifacts").rglob("step_5.json"))
    assert path.parts[-3:] == ("val", "generations", "step_5.json")
    assert json.loads(path.read_text()) == {"columns": ["prompt", "score"], "data": [["2+2=", 1.0]]}


def test_more_than_a_thousand_metrics_and_nan_go_through(run_dir):
    with Tracking("p", "e", "mlflow", run_dir=run_dir) as tracking:
        tracking.log({f"m/{i}": float(i) for i in range(1100)} | {"nan": float("nan"), "inf": float("inf")}, step=1)
    metrics = client(run_dir).get_run(tracking.run_id).data.metrics
    assert len(metrics) == 1102 and metrics["m/1099"] == 1099.0 and metrics["nan"] != metrics["nan"]


def test_a_database_that_breaks_is_reported_once_and_stops_nothing(run_dir, caplog, capfd):
    tracking = Tracking("p", "e", ["mlflow", "file"], run_dir=run_dir)
    tracking.log({"x": 1}, 1)
    written = threading.Event()
    tracking.logger["mlflow"]._put(lambda client, run_id: written.set())
    assert written.wait(60)
    with sqlite3.connect(run_dir / "mlflow.db") as db:
        db.execute("DROP TABLE metrics")
    for step in (2, 3, 4):
        tracking.log({"x": step}, step)
    tracking.finish()
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 4
    found = warnings(caplog)
    assert len(found) == 2
    assert "a write to sqlite:///" in found[0] and "no such table: metrics" in found[0]
    assert found[1] == "mlflow: 3 writes were lost in this run"
    assert "Traceback" not in capfd.readouterr().err


def test_a_full_queue_costs_writes_and_not_time(run_dir, caplog, monkeypatch):
    monkeypatch.setattr("scalerl.metrics.mlflow_backend._QUEUE_SIZE", 2)
    backend = MlflowBackend("p", "e", run_dir)
    backend.wait_started()
    lock = sqlite3.connect(run_dir / "mlflow.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    steps = threading.Thread(target=lambda: [backend.log({"x": step}, step) for step in range(20)], daemon=True)
    steps.start()
    steps.join(20)
    held_up = steps.is_alive()
    lock.execute("ROLLBACK")
    lock.close()
    backend.finish("FINISHED")
    assert not held_up
    found = warnings(caplog)
    assert "2 writes wait already" in found[0] and len(found) == 2
    lost = int(found[1].split()[1])
    assert len(client(run_dir).get_metric_history(backend.run_id, "x")) == 20 - lost


def test_a_server_that_never_answers_does_not_hold_the_end(run_dir, caplog):
    backend = MlflowBackend("p", "e", run_dir, flush_timeout_s=0.3)
    backend.wait_started()
    lock = sqlite3.connect(run_dir / "mlflow.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    backend.log({"x": 1}, 1)
    backend.finish("FINISHED")
    lock.execute("ROLLBACK")
    lock.close()
    assert "did not take everything within" in warnings(caplog)[0]
    backend._thread.join(60)


def test_an_address_where_nothing_listens_is_fatal_and_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        uri = f"http://me:hidden@127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=r"trainer.logger has mlflow, but http://\*\*\*@127") as caught:
            Tracking("p", "e", "mlflow", run_dir=tmp_path, mlflow_tracking_uri=uri)
    assert "trainer.mlflow_tracking_uri" in str(caught.value) and "hidden" not in str(caught.value)


def test_a_file_that_is_no_database_is_fatal(tmp_path):
    (tmp_path / "mlflow.db").write_text("not a database " * 100)
    with pytest.raises(RuntimeError, match="file is not a database"):
        Tracking("p", "e", ["console", "mlflow"], run_dir=tmp_path)


def test_without_waiting_the_failure_shows_in_the_first_log(tmp_path):
    (tmp_path / "mlflow.db").write_text("not a database " * 100)
    tracking = Tracking("p", "e", "mlflow", run_dir=tmp_path, wait=False)
    with pytest.raises(RuntimeError, match="file is not a database"):
        tracking.log({"x": 1}, 1)
    tracking.finish("FAILED")


def test_a_run_of_another_database_is_fatal_and_named(run_dir):
    with pytest.raises(RuntimeError, match="belongs to MLflow run 0123abcd, which is not there"):
        Tracking("p", "e", "mlflow", run_dir=run_dir, run_id="0123abcd")


def test_deleted_runs_and_experiments_are_fatal_with_the_way_back(run_dir):
    tracking = Tracking("p", "e", "mlflow", run_dir=run_dir)
    run_id = tracking.run_id
    tracking.finish()
    client(run_dir).delete_run(run_id)
    with pytest.raises(RuntimeError, match=f"mlflow runs restore --run-id {run_id}"):
        Tracking("p", "e", "mlflow", run_dir=run_dir, run_id=run_id)
    client(run_dir).delete_experiment(client(run_dir).get_experiment_by_name("p").experiment_id)
    with pytest.raises(RuntimeError, match="mlflow experiments restore -x"):
        Tracking("p", "e", "mlflow", run_dir=run_dir)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("val-core/openai/gsm8k/reward/mean@4", "val-core/openai/gsm8k/reward/mean_at_4"),
        ("a//b/../c/", "a/b/c"),
        ("/absolute", "absolute"),
        ("p=0.5 (%)", "p_0.5 ___"),
        ("长/度", "长/度"),
        ("///", "_"),
        ("x" * 400, "x" * 250),
    ],
)
def test_names_are_made_acceptable_to_mlflow(key, name):
    from mlflow.utils.validation import _validate_metric, _validate_param_name

    assert metric_name(key) == name
    _validate_metric(name, 1.0, 0, 0)
    _validate_param_name(name)


def test_params_are_flat_and_without_secrets():
    config = {
        "a": {"b": [1, 2], "c": [{"d": True}]},
        "hub": {"api_key": "sk-1", "token": "hf_1", "max_token_len": 16},
        "uri": "http://me:pw@host/x",
        "reward": {"password": None},
    }
    assert flat_params(config) == {
        "a.b": "[1, 2]",
        "a.c.0.d": "True",
        "hub.api_key": "***",
        "hub.token": "***",
        "hub.max_token_len": "16",
        "uri": "http://***@host/x",
        "reward.password": "None",
    }
    assert safe_uri("sqlite:////a/b@c.db") == "sqlite:////a/b@c.db"


def test_telemetry_is_off(run_dir):
    Tracking("p", "e", "mlflow", run_dir=run_dir).finish()
    from mlflow.environment_variables import MLFLOW_DISABLE_TELEMETRY

    assert MLFLOW_DISABLE_TELEMETRY.get() is True
