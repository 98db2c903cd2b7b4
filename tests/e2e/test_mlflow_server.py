"""A real `mlflow server` that is killed and started again while a run logs to it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from scalerl.rollout.servers.process import free_port
from scalerl.tracking import Tracking, deliver

TIMEOUT_S = 120


class Server:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port("127.0.0.1")
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.directory / 'server.db'}", "--workers", "1"]
        command += ["--artifacts-destination", str(self.directory / "artifacts"), "--serve-artifacts"]
        log = (self.directory / "server.log").open("a")
        environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        # A session of its own: the server and its workers are killed together.
        self._process = subprocess.Popen(
            command, cwd=self.directory, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        log.close()
        wait_for(self._answers)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self.directory / "server.log").read_text()
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("mlflow"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def server(started: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Running. The client does not try again by itself, so that an outage is one at once."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    if started._process is None:
        started.start()
    return started


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.name.startswith("scalerl")]
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


def history(server: Server, run_id: str) -> list[tuple[int, float]]:
    points = MlflowClient(server.uri).get_metric_history(run_id, "critic/score/mean")
    return sorted((point.step, point.value) for point in points)


def spooled(run_dir: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in run_dir.glob("mlflow_spool/*/records.jsonl"))


def artifacts(server: Server, run_id: str) -> list[str]:
    client, files, folders = MlflowClient(server.uri), [], [""]
    while folders:
        for each in client.list_artifacts(run_id, folders.pop()):
            (folders if each.is_dir else files).append(each.path)
    return sorted(files)


def test_a_server_killed_and_restarted_in_the_middle_loses_and_repeats_nothing(server, tmp_path, caplog):
    config = {"trainer": {"nnodes": 1}}
    tracking = Tracking("middle", "e", ["mlflow", "file"], config, run_dir=tmp_path, mlflow_tracking_uri=server.uri)
    run_id = tracking.run_id
    (tmp_path / "config.yaml").write_text("a: 1")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "b.txt").write_text("b")
    for step in range(1, 4):
        tracking.log({"critic/score/mean": step / 10}, step)
    wait_for(lambda: len(history(server, run_id)) == 3)
    # The server has the point before its answer has arrived.
    tracking.flush(TIMEOUT_S)
    server.kill()
    for step in range(4, 8):
        tracking.log({"critic/score/mean": step / 10, "nan": float("nan")}, step)
    tracking.log_table("val/generations", ["prompt", "score"], [["2+2=", 1.0]], 7)
    tracking.log_artifact(tmp_path / "config.yaml")
    tracking.log_artifact(tmp_path / "notes")
    wait_for(lambda: spooled(tmp_path) == 7)
    # What waits has copies of the files.
    (tmp_path / "config.yaml").unlink()
    server.start()
    for step in range(8, 11):
        tracking.log({"critic/score/mean": step / 10}, step)
    tracking.finish()
    assert history(server, run_id) == [(step, step / 10) for step in range(1, 11)]
    run = MlflowClient(server.uri).get_run(run_id)
    assert run.info.status == "FINISHED" and run.data.params == {"trainer.nnodes": "1"}
    assert "system/system_memory_usage_percentage" in run.data.metrics
    assert artifacts(server, run_id) == [
        "config.yaml",
        "notes/b.txt",
        "val/generations/step_7.json",
    ]
    assert not (tmp_path / "mlflow_spool" / run_id).exists()
    away, back = warnings(caplog)
    assert "did not take a record, training continues" in away and "answers again" in back


def test_a_record_that_arrived_although_its_answer_was_lost_is_there_once(server, tmp_path):
    tracking = Tracking("twice", "e", "mlflow", run_dir=tmp_path, mlflow_tracking_uri=server.uri)
    run_id = tracking.run_id
    backend = tracking.logger["mlflow"]
    record = {"kind": "metrics", "data": {"critic/score/mean": 0.5}, "step": 1, "timestamp_ms": 1000}
    for _ in range(2):
        backend._send(record)
    tracking.finish()
    assert history(server, run_id) == [(1, 0.5)]


@pytest.mark.full
def test_what_waits_at_the_end_is_delivered_by_the_process_that_resumes(server, tmp_path, caplog):
    first = open_run(server, tmp_path, finish_timeout_s=10)
    run_id = first.run_id
    first.log({"critic/score/mean": 0.1}, 1)
    wait_for(lambda: len(history(server, run_id)) == 1)
    first.flush(TIMEOUT_S)
    server.kill()
    first.log({"critic/score/mean": 0.2}, 2)
    first.finish("KILLED")
    assert "2 records of run" in warnings(caplog)[-1] and "Deliver them with: python -m" in warnings(caplog)[-1]
    # The server is still away when the run goes on: it begins all the same.
    second = open_run(server, tmp_path, run_id=run_id, resumed_from=2)
    assert second.run_id == run_id
    second.log({"critic/score/mean": 0.3}, 3)
    wait_for(lambda: spooled(tmp_path) >= 2)
    server.start()
    second.log({"critic/score/mean": 0.4}, 4)
    second.finish()
    assert history(server, run_id) == [(step, step / 10) for step in range(1, 5)]
    assert MlflowClient(server.uri).get_run(run_id).info.status == "FINISHED"
    assert not (tmp_path / "mlflow_spool" / run_id).exists()


def test_what_waits_of_a_run_that_is_over_is_delivered_by_the_command(server, tmp_path, capsys):
    tracking = open_run(server, tmp_path, finish_timeout_s=10)
    run_id = tracking.run_id
    server.kill()
    tracking.log({"critic/score/mean": 0.1}, 1)
    wait_for(lambda: spooled(tmp_path) == 1)
    tracking.finish()
    arguments = [str(tmp_path), "--tracking-uri", server.uri]
    assert deliver.main(arguments) == 1
    assert "did not take a record" in capsys.readouterr().err
    server.start()
    assert deliver.main(arguments) == 0
    assert f"{run_id}: " in capsys.readouterr().out
    assert history(server, run_id) == [(1, 0.1)]
    assert deliver.main(arguments) == 0
    assert capsys.readouterr().out == f"nothing waits in {tmp_path / 'mlflow_spool'}\n"


def open_run(server: Server, run_dir: Path, **options) -> Tracking:
    return Tracking("p", "e", "mlflow", run_dir=run_dir, mlflow_tracking_uri=server.uri, **options)
