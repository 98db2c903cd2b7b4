"""Two processes never write one directory, and a process that is gone keeps nobody out."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalerl.base.directory_lock import LOCK, DirectoryInUseError, EarlierAttemptError, directory_lock
from scalerl.errors import RunError, UserError

SETTING = "trainer.default_local_dir = run"
# Says when it has the lock, then waits beside a child that outlives it.
HOLDER = """
import subprocess, sys
from pathlib import Path
from scalerl.base.directory_lock import directory_lock
with directory_lock(Path(sys.argv[1]), "held"):
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    print(child.pid, flush=True)
    child.wait()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"SCALERL_JOB_ID": "4711", "SCALERL_ATTEMPT_DIR": "logs/4711/attempt_0"},
    ) as process:
        child = int(process.stdout.readline())
        yield process
        process.kill()
        os.kill(child, signal.SIGKILL)


def test_who_has_it_is_said(holder: subprocess.Popen, tmp_path: Path) -> None:
    with pytest.raises(DirectoryInUseError) as caught, directory_lock(tmp_path, SETTING):
        pass
    assert str(caught.value).startswith(
        f"{SETTING}: another run is writing there (host {socket.gethostname()}, process {holder.pid}, since 2"
    )
    assert "Slurm job 4711" in str(caught.value)


def test_a_killed_process_keeps_nobody_out_though_its_child_lives(holder: subprocess.Popen, tmp_path: Path) -> None:
    holder.kill()
    holder.wait()
    with directory_lock(tmp_path, SETTING):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == str(os.getpid())
    with directory_lock(tmp_path, SETTING):
        pass


def test_a_machine_that_is_gone_is_waited_for(holder: subprocess.Popen, tmp_path: Path) -> None:
    """Its lock is the file system's, which gives it up after a while."""
    mine = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps(mine | {"host": "another"}))
    with pytest.raises(DirectoryInUseError, match="host another"), directory_lock(tmp_path, SETTING, grace_s=0.1):
        pass
    killed = []

    def kill() -> None:
        killed.append(True)
        holder.kill()

    threading.Timer(0.5, kill).start()
    with directory_lock(tmp_path, SETTING, grace_s=60.0):
        assert killed


@pytest.mark.parametrize("host", [None, "another"])
def test_an_earlier_attempt_of_the_job_is_waited_for_and_no_mistake_of_the_users(
    holder: subprocess.Popen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str | None
) -> None:
    """Slurm starts a job again when slurmd of its node has died, though the processes there live on."""
    if host is not None:
        (tmp_path / LOCK).write_text(json.dumps(json.loads((tmp_path / LOCK).read_text()) | {"host": host}))
    monkeypatch.setenv("SCALERL_JOB_ID", "4711")
    # Another program of the same attempt is another run.
    monkeypatch.setenv("SCALERL_ATTEMPT_DIR", "elsewhere/attempt_0")
    with pytest.raises(DirectoryInUseError), directory_lock(tmp_path, SETTING, grace_s=0.1):
        pass
    monkeypatch.setenv("SCALERL_ATTEMPT_DIR", "elsewhere/attempt_1")
    with (
        pytest.raises(EarlierAttemptError, match="Slurm job 4711, attempt attempt_0") as raised,
        directory_lock(tmp_path, SETTING, grace_s=0.0, earlier_attempt_grace_s=0.1),
    ):
        pass
    # Code 70, with which a job comes back, and not 2.
    assert isinstance(raised.value, RunError) and not isinstance(raised.value, UserError)
    threading.Timer(0.5, holder.kill).start()
    with directory_lock(tmp_path, SETTING, grace_s=0.0):
        assert json.loads((tmp_path / LOCK).read_text())["attempt"] == "attempt_1"


@pytest.mark.parametrize("content", ["", "half", "[1]"])
def test_a_holder_that_has_not_written_yet_is_refused_too(
    holder: subprocess.Popen, tmp_path: Path, content: str
) -> None:
    (tmp_path / LOCK).write_text(content)
    with pytest.raises(DirectoryInUseError, match="it has just begun"), directory_lock(tmp_path, SETTING):
        pass
