from __future__ import annotations

import json
import logging
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient
from PIL import Image

from scalerl.errors import UserError
from scalerl.tracking import Tracking
from scalerl.tracking.backend import flat_config, safe_uri
from scalerl.tracking.metrics import Metric
from scalerl.tracking.mlflow_names import how_to_open, metric_name, param_text
from scalerl.tracking.spool import Spool
from tests.lanes import full


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
    records = [record for record in caplog.records if record.name.startswith("scalerl")]
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


def history(run_dir: Path, run_id: str, key: str = "x") -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client(run_dir).get_metric_history(run_id, key)]


def wait_for(happened: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
    first.tag("alarm.kl", "2")
    first.finish("FAILED")
    resumed: dict[str, Any] = {"run_dir": run_dir, "run_id": run_id, "resumed_from": 3}
    second = Tracking("p", "e", "mlflow", {"lr": 2.0, "seed": 7, "new": 1}, **resumed)
    assert second.run_id == run_id
    assert client(run_dir).get_run(run_id).info.status == "RUNNING"
    second.log({"x": 40}, 4)
    # An alarm's first step stays.
    second.tag("alarm.kl", "4")
    second.finish()
    run = client(run_dir).get_run(run_id)
    assert history(run_dir, run_id) == [(1, 1), (2, 2), (3, 3), (4, 40)]
    assert run.info.status == "FINISHED"
    # MLflow refuses a second value for a param: the change is a tag, and the run goes on.
    assert run.data.params == {"lr": "1.0", "seed": "7", "new": "1"}
    assert run.data.tags["alarm.kl"] == "2"
    assert run.data.tags["changed.lr"] == "2.0" and "changed.seed" not in run.data.tags
    assert len(client(run_dir).search_runs([run.info.experiment_id])) == 1


def test_steps_that_are_done_again_have_one_value(run_dir):
    """After a crash between saves: the steps behind the checkpoint are those of the process that goes on."""
    first = Tracking("p", "e", "mlflow", run_dir=run_dir)
    run_id = first.run_id
    first.log({"val/x": 0.0, "x": 0.0}, 0)
    for step in range(1, 6):
        first.log({"x": step, "val/x": step, "critic/score/mean": step, **({"rare": step} if step > 2 else {})}, step)
    first.finish("KILLED")
    other = Tracking("p", "other", "mlflow", run_dir=run_dir)
    other.log({"x": 7}, 7)
    other.finish()

    second = Tracking("p", "e", "mlflow", run_dir=run_dir, run_id=run_id, resumed_from=2)
    second.wait_started()
    # Also what the list of runs shows is of the last step that counts.
    assert "rare" not in client(run_dir).get_run(run_id).data.metrics
    assert client(run_dir).get_run(run_id).data.metrics["x"] == 2
    # It validates the step that it resumes from.
    second.log({"val/x": 20}, 2)
    for step in (3, 4):
        second.log({"x": 10 * step}, step)
    second.finish()
    assert history(run_dir, run_id) == [(0, 0), (1, 1), (2, 2), (3, 30), (4, 40)]
    assert history(run_dir, run_id, "val/x") == [(0, 0), (1, 1), (2, 20)]
    # The copies that sort first, too.
    assert history(run_dir, run_id, "1 reward/score") == [(1, 1), (2, 2)]
    metrics = client(run_dir).get_run(run_id).data.metrics
    assert (metrics["x"], metrics["val/x"]) == (40, 20)

    # One that begins again has nothing of before.
    third = Tracking("p", "e", "mlflow", run_dir=run_dir, run_id=run_id, restarted=True)
    third.log({"x": 100}, 0)
    third.finish()
    assert history(run_dir, run_id) == [(0, 100)] and history(run_dir, run_id, "val/x") == []
    assert history(run_dir, other.run_id or "") == [(7, 7)]


def test_what_an_earlier_process_could_not_deliver_gives_no_step_two_values(run_dir):
    first = Tracking("p", "e", "mlflow", run_dir=run_dir)
    run_id = first.run_id or ""
    first.log({"x": 1}, 1)
    first.finish("KILLED")
    waiting = Spool(run_dir / "mlflow_spool" / run_id)
    for step in (1, 2):
        waiting.append({"kind": "metrics", "data": {"y": step}, "step": step, "timestamp_ms": 1})
    with Tracking("p", "e", "mlflow", run_dir=run_dir, run_id=run_id, resumed_from=1) as second:
        second.log({"x": 20, "y": 20}, 2)
    assert (history(run_dir, run_id), history(run_dir, run_id, "y")) == ([(1, 1), (2, 20)], [(1, 1), (2, 20)])


@pytest.mark.parametrize("name", ["a what?x", "b 50%20off", "c#d", "e%2Ff&g=h", "100%", "été: @"])
def test_a_directory_with_signs_of_addresses_has_its_database_and_artifacts(tmp_path, name):
    run_dir = tmp_path / name
    with Tracking("p", "e", "mlflow", run_dir=run_dir) as tracking:
        tracking.log({"critic/score/mean": 1}, 1)
        (run_dir / "notes.txt").write_text("a")
        tracking.log_artifact(run_dir / "notes.txt")
        how, run_id = tracking.how_to_open or "", tracking.run_id or ""
    assert (run_dir / "mlflow.db").is_file() and list((run_dir / "mlartifacts").rglob("notes.txt"))
    assert [path for path in tmp_path.rglob("*.db") if path.parent != run_dir] == []
    # The store that the printed command opens has the run.
    command = shlex.split(how.splitlines()[-1].partition("once this runs: ")[2])
    shown = MlflowClient(command[-1])
    assert shown.get_run(run_id).info.run_name == "e"
    assert [each.path for each in shown.list_artifacts(run_id)] == ["notes.txt"]


def test_the_variable_of_mlflow_says_where_runs_go_and_the_key_wins(run_dir, tmp_path, monkeypatch, empty_db):
    own = tmp_path / "own"
    shutil.copytree(empty_db.parent, own)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{run_dir}/mlflow.db")
    with Tracking("p", "e", "mlflow", run_dir=tmp_path / "run", continue_unfinished=True) as by_variable:
        assert by_variable.tracking_uri == f"sqlite:///{run_dir}/mlflow.db"
    assert not (tmp_path / "run" / "mlflow.db").exists()
    uri = f"sqlite:///{own}/mlflow.db"
    with Tracking("p", "e", "mlflow", run_dir=tmp_path / "run", mlflow_tracking_uri=uri) as by_key:
        assert by_key.tracking_uri == uri


def test_a_run_that_was_lost_before_its_first_checkpoint_is_continued(run_dir):
    lost = Tracking("p", "e", "mlflow", run_dir=run_dir, continue_unfinished=True)
    lost.log({"x": 1}, 1)
    lost.flush()
    # It ended without a word. One that starts anew is another.
    anew = Tracking("p", "e", "mlflow", run_dir=run_dir)
    assert anew.run_id != lost.run_id
    second = Tracking("p", "e", "mlflow", run_dir=run_dir, continue_unfinished=True)
    assert second.run_id == anew.run_id
    second.finish("KILLED")
    third = Tracking("p", "e", "mlflow", run_dir=run_dir, continue_unfinished=True)
    assert third.run_id == anew.run_id
    third.finish()
    # What is finished is not.
    fourth = Tracking("p", "e", "mlflow", run_dir=run_dir, continue_unfinished=True)
    assert fourth.run_id not in (lost.run_id, anew.run_id)
    for each in (fourth, anew, lost):
        each.finish("FAILED")


def test_an_unfinished_run_that_is_elsewhere_or_gone_is_not_looked_for(run_dir, tmp_path):
    first = Tracking("p", "e", "mlflow", run_dir=run_dir)
    first.finish("FAILED")
    client(run_dir).delete_run(first.run_id)
    second = Tracking("p", "e", "mlflow", run_dir=run_dir, continue_unfinished=True)
    assert second.run_id != first.run_id
    second.finish("FAILED")
    shutil.copy(run_dir / "mlflow.db", run_dir / "other.db")
    uri = f"sqlite:///{run_dir}/other.db"
    third = Tracking("p", "e", "mlflow", run_dir=run_dir, mlflow_tracking_uri=uri, continue_unfinished=True)
    assert third.run_id != second.run_id
    third.finish("FAILED")
    (run_dir / "mlflow_run.json").write_text("{")
    fourth = Tracking("p", "e", "mlflow", run_dir=run_dir, mlflow_tracking_uri=uri, continue_unfinished=True)
    assert fourth.run_id != third.run_id
    fourth.finish()


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


def test_more_than_a_thousand_metrics_and_nan_go_through(run_dir):
    with Tracking("p", "e", "mlflow", run_dir=run_dir) as tracking:
        tracking.log({f"m/{i}": float(i) for i in range(1100)} | {"nan": float("nan"), "inf": float("inf")}, step=1)
    metrics = client(run_dir).get_run(tracking.run_id).data.metrics
    metrics = {name: value for name, value in metrics.items() if not name.startswith("system/")}
    assert len(metrics) == 1102 and metrics["m/1099"] == 1099.0 and metrics["nan"] != metrics["nan"]


def test_a_record_that_the_database_refuses_is_given_up_and_the_next_ones_are_kept(run_dir, caplog, capfd):
    tracking = Tracking("p", "e", ["mlflow", "file"], run_dir=run_dir)
    tracking.log({"x": 1}, 1)
    wait_for(lambda: history(run_dir, tracking.run_id) == [(1, 1.0)])
    with sqlite3.connect(run_dir / "mlflow.db", timeout=60) as db:
        db.execute(
            "CREATE TRIGGER no BEFORE INSERT ON metrics WHEN NEW.step = 2 BEGIN SELECT RAISE(ABORT, 'no 2'); END"
        )
    for step in (2, 3, 4):
        tracking.log({"x": step}, step)
    tracking.finish()
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 4
    assert history(run_dir, tracking.run_id) == [(1, 1.0), (3, 3.0), (4, 4.0)]
    first, last = warnings(caplog)
    assert "'mlflow': a write failed" in first and "no 2" in first
    assert last == "tracking backend 'mlflow': 1 of 5 writes failed or were dropped in this run"
    assert client(run_dir).get_run(tracking.run_id).info.status == "FINISHED"
    assert not (run_dir / "mlflow_spool" / tracking.run_id).exists()
    assert "Traceback" not in capfd.readouterr().err


def test_a_record_that_never_gets_through_is_given_up_after_some_attempts(run_dir, caplog):
    tracking = Tracking("p", "e", "mlflow", run_dir=run_dir)
    tracking.wait_started()
    # Where the artifacts belong is a file: an error that another attempt might not meet.
    (run_dir / "mlartifacts").write_text("in the way")
    (run_dir / "a.txt").write_text("a")
    tracking.log({"x": 1}, 1)
    tracking.log_artifact(run_dir / "a.txt")
    tracking.log({"x": 2}, 2)
    tracking.finish()
    messages = warnings(caplog)
    assert "did not take a record, training continues" in messages[0] and "mlartifacts" in messages[0]
    assert "mlflow: a record was refused" in messages[1]
    assert history(run_dir, tracking.run_id) == [(1, 1.0), (2, 2.0)]
    assert client(run_dir).get_run(tracking.run_id).info.status == "FINISHED"
    assert not (run_dir / "mlflow_spool" / tracking.run_id).exists()


def test_a_locked_database_holds_up_no_step_and_loses_nothing(run_dir, caplog, monkeypatch):
    tracking = Tracking("p", "e", "mlflow", run_dir=run_dir)
    lock = sqlite3.connect(run_dir / "mlflow.db", timeout=60, isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    steps = threading.Thread(target=lambda: [tracking.log({"x": step}, step) for step in range(20)], daemon=True)
    steps.start()
    steps.join(20)
    held_up = steps.is_alive()
    lock.execute("ROLLBACK")
    lock.close()
    tracking.finish()
    assert not held_up
    assert history(run_dir, tracking.run_id) == [(step, float(step)) for step in range(20)]


def test_an_address_where_nothing_listens_is_fatal_and_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        uri = f"http://me:hidden@127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=r"trainer.logger has mlflow, but http://\*\*\*@127") as caught:
            Tracking("p", "e", "mlflow", run_dir=tmp_path, mlflow_tracking_uri=uri)
    assert "trainer.mlflow_tracking_uri" in str(caught.value) and "hidden" not in str(caught.value)


# Stops itself in the middle of MLflow's tables; if it goes on, it has a run of its own.
STOPS_IN_THE_TABLES = """
import os, signal, sys
from pathlib import Path

import sqlalchemy

from scalerl.tracking import Tracking

stopped = []

def stop(connection, cursor, statement, *others):
    if "ALTER TABLE" in statement and not stopped:
        stopped.append(statement)
        os.kill(os.getpid(), signal.SIGSTOP)

sqlalchemy.event.listen(sqlalchemy.Engine, "after_cursor_execute", stop)
Tracking("p", "of the other", "mlflow", run_dir=Path(sys.argv[1])).finish()
"""


@pytest.mark.parametrize("killed", [True, full(False)])
def test_a_process_that_is_killed_or_outrun_while_it_makes_the_database_spoils_nothing(tmp_path, killed):
    """What it had made is not taken for MLflow's file, nor takes the place of one that has a run by then."""
    with subprocess.Popen([sys.executable, "-c", STOPS_IN_THE_TABLES, str(tmp_path)]) as other:
        try:
            wait_for(lambda: psutil.Process(other.pid).status() == psutil.STATUS_STOPPED)
            if killed:
                other.kill()
                other.wait()
            tracking = Tracking("p", "mine", "mlflow", run_dir=tmp_path)
            tracking.log({"x": 0.5}, 1)
            tracking.finish()
            other.send_signal(signal.SIGCONT)
        except BaseException:
            other.kill()
            raise
    assert other.returncode == (-signal.SIGKILL if killed else 0)
    experiments = [experiment.experiment_id for experiment in client(tmp_path).search_experiments()]
    names = {run.info.run_name for run in client(tmp_path).search_runs(experiments)}
    assert names == ({"mine"} if killed else {"mine", "of the other"})
    assert history(tmp_path, tracking.run_id) == [(1, 0.5)]
    assert not list(tmp_path.glob(".mlflow.db*"))


def test_a_file_that_is_no_database_is_fatal(tmp_path):
    (tmp_path / "mlflow.db").write_text("not a database " * 100)
    with pytest.raises(RuntimeError, match="file is not a database"):
        Tracking("p", "e", ["console", "mlflow"], run_dir=tmp_path)


def test_a_run_of_another_database_is_fatal_and_named(run_dir):
    # Without a stack.
    with pytest.raises(UserError, match="belongs to MLflow run 0123abcd, which is not there"):
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


def test_keys_that_mlflow_would_call_alike_keep_a_curve_each(tmp_path, caplog):
    long = "x" * 300
    with Tracking("p", "e", "mlflow", run_dir=tmp_path) as tracking:
        for step in (1, 2):
            tracking.log(
                {"a@b": 1.0, "a_at_b": 2.0, "a#b": 3.0, "a_b": 4.0, f"{long}1": 5.0, f"{long}2": 6.0}, step=step
            )
    run = client(tmp_path).get_run(tracking.run_id)
    ours = {name: value for name, value in run.data.metrics.items() if name.startswith(("a_", "x"))}
    assert sorted(ours.values()) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert ours["a_at_b"] == 1.0 and all(len(name) <= 250 for name in ours)
    (other,) = [name for name, value in ours.items() if value == 2.0]
    assert other.startswith("a_at_b_")
    assert len(client(tmp_path).get_metric_history(tracking.run_id, other)) == 2
    assert caplog.text.count("the metrics 'a@b' and 'a_at_b' have one name there") == 1


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
        "hosts": ["http://me:pw@host/y"],
    }
    assert {key: param_text(value) for key, value in flat_config(config).items()} == {
        "a.b": "[1, 2]",
        "a.c.0.d": "True",
        "hub.api_key": "***",
        "hub.token": "***",
        "hub.max_token_len": "16",
        "uri": "http://***@host/x",
        "reward.password": "None",
        "hosts": '["http://***@host/y"]',
    }
    assert safe_uri("sqlite:////a/b@c.db") == "sqlite:////a/b@c.db"


def test_tables_are_found_by_mlflow_itself(run_dir, monkeypatch):
    # load_table looks for runs where the process's default is.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{run_dir}/mlflow.db")
    with Tracking("p", "e", "mlflow", run_dir=run_dir) as tracking:
        for step in (5, 10, 10):
            tracking.log_table("val/generations", ["prompt", "score"], [["2+2=", step / 10]], step=step)
    tag = json.loads(client(run_dir).get_run(tracking.run_id).data.tags["mlflow.loggedArtifacts"])
    assert tag == [{"path": f"val/generations/step_{step}.json", "type": "table"} for step in (5, 10)]
    run = client(run_dir).get_run(tracking.run_id)
    table = client(run_dir).load_table(run.info.experiment_id, "val/generations/step_10.json", [tracking.run_id])
    assert table.to_dict("list") == {"prompt": ["2+2="], "score": [1.0]}


def test_images_of_a_table_are_files_that_it_names_and_other_backends_say_that_there_are_some(run_dir):
    with Tracking("p", "e", ["mlflow", "file"], run_dir=run_dir) as tracking:
        rows = [["a", b"one"], ["b", b"two"], ["c", ""]]
        tracking.log_table("val/generations", ["prompt", "image/0"], rows, step=5)
    path = Path(client(run_dir).download_artifacts(tracking.run_id, "val/generations/step_5.json", str(run_dir)))
    cells = [row[1] for row in json.loads(path.read_text())["data"]]
    # MLflow's page shows the images of a column alone that has one in each row.
    assert [cell["type"] for cell in cells] == ["image"] * 3
    kept = [client(run_dir).download_artifacts(tracking.run_id, cell["filepath"], str(run_dir)) for cell in cells]
    assert [Path(file).read_bytes() for file in kept[:2]] == [b"one", b"two"]
    with Image.open(kept[2]) as nothing:
        assert nothing.convert("RGBA").getextrema()[3] == (0, 0)
    table = json.loads((run_dir / "tables/val/generations/step_5.json").read_text())
    assert table["data"] == [["a", "<image>"], ["b", "<image>"], ["c", ""]]


def test_load_of_the_machine_is_recorded_once_per_step(run_dir):
    with Tracking("p", "e", "mlflow", run_dir=run_dir) as tracking:
        tracking.log({"x": 1}, 1)
        tracking.log({"val": 1}, 1)
    metrics = client(run_dir).get_run(tracking.run_id).data.metrics
    used = metrics["system/system_memory_usage_percentage"]
    assert 0 < used <= 100 and "system/cpu_utilization_percentage" in metrics
    assert len(history(run_dir, tracking.run_id, "system/system_memory_usage_percentage")) == 1


def test_what_a_person_looks_at_first_comes_first_in_sections(run_dir):
    step = {
        "actor/entropy": 0.25,
        "actor/grad_norm": 8.0,
        "critic/score/mean": 0.5,
        "reward_extra/acc": 1.0,
        "perf/throughput": 900.0,
        "response_length/mean": 3.0,
        "val-core/a/b/reward/mean@4": 0.75,
    }
    with Tracking("p", "e", "mlflow", run_dir=run_dir) as tracking:
        tracking.log(step, 1)
    metrics = client(run_dir).get_run(tracking.run_id).data.metrics
    # As MLflow's page makes and sorts them: all but the last part of a name is its section.
    names = sorted(name for name in metrics if not name.startswith("system/"))
    sections = list(dict.fromkeys(name.rpartition("/")[0] for name in names))
    assert sections[:5] == ["1 reward", "2 validation", "3 response length", "4 KL and entropy", "5 throughput"]
    assert metrics["1 reward/score"] == 0.5 and metrics["1 reward/acc"] == 1.0
    assert metrics["2 validation/a b reward mean_at_4"] == 0.75
    assert metrics["5 throughput/tokens per s and device"] == 900.0
    assert {metric_name(key) for key in step} <= set(names) and len(names) == 2 * len(step) - 1


def test_the_run_list_and_the_run_say_what_it_is(run_dir, tmp_path):
    data = tmp_path / "train.parquet"
    data.write_text("rows")
    what = {"description": "- **model**: `m`", "tags": {"algorithm": "grpo"}, "datasets": {"training": [str(data)]}}
    first = Tracking("p", "e", "mlflow", run_dir=run_dir, **what)
    run_id = first.run_id
    first.finish()
    run = client(run_dir).get_run(run_id)
    assert run.data.tags["mlflow.note.content"] == "- **model**: `m`" and run.data.tags["algorithm"] == "grpo"
    (dataset,) = run.inputs.dataset_inputs
    assert dataset.dataset.name == "train.parquet" and json.loads(dataset.dataset.source) == {"uri": str(data)}
    assert [(tag.key, tag.value) for tag in dataset.tags] == [("mlflow.data.context", "training")]
    experiment = client(run_dir).get_experiment(run.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    # What somebody wrote there stays, also where the run goes on.
    client(run_dir).set_tag(run_id, "mlflow.note.content", "the good one")
    Tracking("p", "e", "mlflow", run_dir=run_dir, run_id=run_id, resumed_from=1, **what).finish()
    assert client(run_dir).get_run(run_id).data.tags["mlflow.note.content"] == "the good one"


def test_what_to_open_is_said(run_dir):
    with Tracking("p", "e", ["mlflow"], run_dir=run_dir) as tracking:
        how, run_id = tracking.how_to_open, tracking.run_id
    experiment = client(run_dir).get_run(run_id).info.experiment_id
    page = f"#/experiments/{experiment}/runs/{run_id}/model-metrics?workflowType=machine_learning"
    assert how is not None and f"http://127.0.0.1:5000/{page}" in how
    assert f"ui --backend-store-uri sqlite:///{run_dir}/mlflow.db" in how
    assert how_to_open("https://me:hidden@host/mlflow/", experiment, run_id) == f"charts: https://host/mlflow/{page}"
    with Tracking("p", "e", "file", run_dir=run_dir) as tracking:
        assert tracking.how_to_open is None
