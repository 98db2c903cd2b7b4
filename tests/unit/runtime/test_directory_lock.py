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

from scalerl.runtime.directory_lock import LOCK, DirectoryInUseError, directory_lock

SETTING = "trainer.default_local_dir = run"
# Says when it has the lock, then waits beside a child that outlives it.
HOLDER = """
import subprocess, sys
from pathlib import Path
from scalerl.runtime.directory_lock import directory_lock
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
        env=os.environ | {"SCALERL_JOB_ID": "4711"},
    ) as process:
        child = int(process.stdout.readline())
        yield process
        process.kill()
        os.kill(child, signal.SIGKILL)


def test_who_has_it_is_said(holder: subprocess.Popen, tmp_path: Path) -> None:
    with pytest.raises(DirectoryInUseError) as found, directory_lock(tmp_path, SETTING):
        pass
    assert str(found.value).startswith(
        f"{SETTING}: another run is writing there (host {socket.gethostname()}, process {holder.pid}, since 2"
    )
    assert "Slurm job 4711" in str(found.value)


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
    threading.Timer(0.5, holder.kill).start()
    with directory_lock(tmp_path, SETTING, grace_s=60.0):
        assert holder.poll() is not None


@pytest.mark.parametrize("content", ["", "half", "[1]"])
def test_a_holder_that_has_not_written_yet_is_refused_too(
    holder: subprocess.Popen, tmp_path: Path, content: str
) -> None:
    (tmp_path / LOCK).write_text(content)
    with pytest.raises(DirectoryInUseError, match="it has just begun"), directory_lock(tmp_path, SETTING):
        pass
