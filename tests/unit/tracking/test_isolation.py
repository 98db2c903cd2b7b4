"""Backends that misbehave, registered as a user would."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalerl.tracking import Tracking, register_backend, unregister_backend

TIMEOUT_S = 60


class Recorder:
    """Keeps what it is told; the tests' backends misbehave in one call each."""

    def __init__(self, run) -> None:
        self.run = run
        self.calls: list[tuple] = []

    def log(self, data, step, time_s) -> None:
        self.calls.append((step, dict(data)))

    def log_artifact(self, path) -> None:
        self.calls.append(("artifact", path))

    def log_table(self, name, columns, rows, step) -> None:
        self.calls.append(("table", name, step))

    def finish(self, status) -> None:
        self.calls.append(("finish", status))


@pytest.fixture
def register() -> Iterator:
    names = []

    def register(opener, name="mine") -> None:
        register_backend(name)(opener)
        names.append(name)

    yield register
    for name in names:
        unregister_backend(name)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def steps_in_file(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def wait_for_file(run_dir: Path, step: int) -> None:
    """Until the file's backend has written the step: at the end all backends share one deadline."""
    while steps_in_file(run_dir)[-1:] != [step]:
        time.sleep(0.001)


def in_time(call) -> None:
    """Fails, instead of hanging, when the call does not come back."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_a_registered_backend_gets_every_call_in_order(register, tmp_path, caplog):
    register(Recorder)
    tracking = Tracking("p", "e", ["mine"], {"a": 1}, run_dir=tmp_path, resumed_from=3)
    mine = tracking.logger["mine"]
    tracking.log({"x": 1}, 4)
    tracking.log_table("t", ["c"], [["r"]], 4)
    tracking.log_artifact(tmp_path)
    tracking.finish("KILLED")
    assert mine.calls == [(4, {"x": 1.0}), ("table", "t", 4), ("artifact", tmp_path), ("finish", "KILLED")]
    assert (mine.run.project_name, mine.run.config, mine.run.resumed_from) == ("p", {"a": 1}, 3)
    assert warnings(caplog) == []
    with pytest.raises(ValueError, match="'mine' is registered already"):
        register_backend("mine")(dict)


def test_a_flush_waits_for_what_was_logged(register, tmp_path):
    class Slow(Recorder):
        def log(self, data, step, time_s) -> None:
            threading.Event().wait(0.2)
            super().log(data, step, time_s)

    register(Slow)
    tracking = Tracking("p", "e", ["mine", "file"], run_dir=tmp_path)
    for step in (1, 2):
        tracking.log({"x": 1}, step)
        tracking.flush(TIMEOUT_S)
        assert len(tracking.logger["mine"].calls) == step and steps_in_file(tmp_path)[-1] == step
    tracking.finish()


def test_a_flush_waits_but_once_for_one_that_hangs(register, tmp_path):
    release = threading.Event()

    class Hangs(Recorder):
        def log(self, data, step, time_s) -> None:
            release.wait(TIMEOUT_S)
            super().log(data, step, time_s)

    register(Hangs)
    tracking = Tracking("p", "e", ["mine"], run_dir=tmp_path)
    tracking.log({"x": 1}, 1)
    in_time(lambda: tracking.flush(0.1))
    # It still has the first one to write.
    in_time(lambda: tracking.flush(10 * TIMEOUT_S))
    release.set()
    mine = tracking.logger["mine"]
    tracking.finish()
    assert mine.calls == [(1, {"x": 1.0}), ("finish", "FINISHED")]


@pytest.mark.parametrize("error", [ConnectionError("no route"), SystemExit(3)])
def test_one_that_raises_is_reported_once_and_counted_at_the_end(register, tmp_path, caplog, error):
    class Raises(Recorder):
        def log(self, data, step, time_s) -> None:
            if step != 2:
                raise error
            super().log(data, step, time_s)

    register(Raises)
    tracking = Tracking("p", "e", ["mine", "file"], run_dir=tmp_path)
    mine = tracking.logger["mine"]
    for step in (1, 2, 3, 4):
        tracking.log({"x": 1}, step)
    tracking.finish()
    assert steps_in_file(tmp_path) == [1, 2, 3, 4]
    assert mine.calls == [(2, {"x": 1.0}), ("finish", "FINISHED")]
    first, last = warnings(caplog)
    assert "'mine': a write failed, training continues" in first and str(error) in first
    assert last == "tracking backend 'mine': 3 of 5 writes failed or were dropped in this run"


def test_one_that_hangs_in_log_holds_up_neither_steps_nor_the_end(register, tmp_path, caplog):
    began, release = threading.Event(), threading.Event()

    class Hangs(Recorder):
        def log(self, data, step, time_s) -> None:
            began.set()
            release.wait()

    register(Hangs)
    tracking = Tracking("p", "e", ["mine", "file"], run_dir=tmp_path, queue_size=3, finish_timeout_s=0.5)

    def run() -> None:
        for step in range(20):
            tracking.log({"x": 1}, step)
            began.wait()
            # The file's queue has three places, too.
            wait_for_file(tmp_path, step)
        tracking.finish()

    try:
        in_time(run)
        messages = warnings(caplog)
    finally:
        release.set()
    assert steps_in_file(tmp_path) == list(range(20))
    assert sum("3 writes wait already: it is too slow, or hangs" in text for text in messages) == 1
    assert any("'mine' did not end in time and is left behind" in text for text in messages)
    # One is being written, three wait.
    assert "tracking backend 'mine': 16 of 20 writes failed or were dropped in this run" in messages


def test_one_that_hangs_at_close_is_left_behind(register, tmp_path, caplog):
    release = threading.Event()

    class HangsAtClose(Recorder):
        def finish(self, status) -> None:
            release.wait()

    register(HangsAtClose)
    tracking = Tracking("p", "e", ["mine", "file"], run_dir=tmp_path, finish_timeout_s=0.5)
    tracking.log({"x": 1}, 1)

    def run() -> None:
        wait_for_file(tmp_path, 1)
        tracking.finish()

    try:
        in_time(run)
    finally:
        release.set()
    assert steps_in_file(tmp_path) == [1]
    assert "'mine' did not end in time" in warnings(caplog)[0]


def test_one_that_hangs_when_opened_ends_the_start_with_its_name(register, tmp_path):
    release = threading.Event()

    def hangs(run) -> Recorder:
        release.wait()
        return Recorder(run)

    register(hangs)
    try:
        with pytest.raises(RuntimeError, match=r"trainer.logger has mine, which did not start within 0 s"):
            Tracking("p", "e", ["mine"], run_dir=tmp_path, start_timeout_s=0.2, finish_timeout_s=0.2)
    finally:
        release.set()


def test_one_that_cannot_be_opened_ends_the_start_with_its_cause(register, tmp_path, capsys):
    def refuses(run) -> Recorder:
        raise PermissionError("not for you")

    register(refuses)
    with pytest.raises(PermissionError, match="not for you"):
        Tracking("p", "e", ["console", "mine", "file"], run_dir=tmp_path)
    # Without waiting it shows in the first log.
    tracking = Tracking("p", "e", ["mine"], run_dir=tmp_path, wait=False)
    with pytest.raises(PermissionError, match="not for you"):
        tracking.log({"x": 1}, 1)
    tracking.finish("FAILED")


def test_a_console_that_raises_is_isolated_too(tmp_path, caplog, monkeypatch):
    tracking = Tracking("p", "e", ["console", "file"], run_dir=tmp_path)
    (tmp_path / "closed").touch()
    with (tmp_path / "closed").open("w") as closed:
        tracking.logger["console"].progress._stream = closed
    for step in (1, 2):
        tracking.log({"train/loss": 1.0}, step)
    tracking.finish()
    assert steps_in_file(tmp_path) == [1, 2]
    messages = warnings(caplog)
    assert "'console': a write failed" in messages[0] and messages[1] == "tracking backend 'console': 2 writes failed"


def test_a_process_ends_although_a_backend_hangs(tmp_path):
    program = """
        import sys, threading, time
        from pathlib import Path
        from scalerl.tracking import Tracking
        from scalerl.tracking import register_backend

        @register_backend("mine")
        class Hangs:
            def __init__(self, run): pass
            def log(self, data, step, time_s): threading.Event().wait()
            def finish(self, status): pass

        with Tracking("p", "e", ["mine", "file"], run_dir=sys.argv[1], finish_timeout_s=0.2) as tracking:
            tracking.log({"x": 1}, 1)
            while not Path(sys.argv[1], "metrics.jsonl").read_text():
                time.sleep(0.001)
        print("over")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
    assert "'mine' did not end in time" in done.stderr
    assert steps_in_file(tmp_path) == [1]


def test_the_example_of_the_documentation_works(tmp_path):
    document = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
    (example,) = re.findall(r"```python\n(# my_tracking.py\n.*?)```", document, flags=re.DOTALL)
    try:
        exec(compile(example, "docs/extending.md", "exec"), {})
        with Tracking("p", "e", ["csv"], run_dir=tmp_path) as tracking:
            tracking.log({"x": 0.5}, 3)
            tracking.log_table("t", ["c"], [["r"]], 3)
    finally:
        unregister_backend("csv")
    assert (tmp_path / "metrics.csv").read_text() == "3,x,0.5\n"
