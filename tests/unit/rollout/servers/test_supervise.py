from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Looks at its command once, and then only when it is woken.
SUPERVISE = """
import sys
from scalerl.rollout.servers import supervise

supervise.POLL_INTERVAL_S = 100_000
sys.exit(supervise.supervise(sys.argv[2:], sys.argv[1]))
"""
COMMAND = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
TIMEOUT_S = 60


@pytest.mark.parametrize(("ended", "code"), [("command", 128 + signal.SIGTERM), ("supervisor", 128 + signal.SIGKILL)])
def test_the_end_of_the_command_and_a_request_to_stop_wake_the_supervisor(
    tmp_path: Path, ended: str, code: int
) -> None:
    log = tmp_path / "log"
    arguments = [sys.executable, "-c", SUPERVISE, str(log), sys.executable, "-c", COMMAND]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE) as supervisor:
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not (log.exists() and log.read_text().endswith("\n")):
                assert time.monotonic() < deadline and supervisor.poll() is None
                time.sleep(0.01)
            command = int(log.read_text())
            os.kill(command if ended == "command" else supervisor.pid, signal.SIGTERM)
            assert supervisor.wait(TIMEOUT_S) == code
        finally:
            supervisor.kill()
