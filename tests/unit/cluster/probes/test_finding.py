from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from scalerl.cluster.probes.finding import run_interpreter


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11: no message"),
        ("raise OSError('libfoo.so: undefined symbol')", "OSError: libfoo.so: undefined symbol"),
        ("raise SystemExit(3)", "no message"),
    ],
)
def test_crash_of_an_import_is_an_error_here(code: str, error: str) -> None:
    assert run_interpreter(["-c", code]) == ("", error)


def test_what_hangs_is_ended_with_its_own_processes(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess; null = subprocess.DEVNULL; "
        "process = subprocess.Popen(['sleep', '600'], stdout=null, stderr=null); "
        f"open({str(pid_file)!r}, 'w').write(str(process.pid)); process.wait()"
    )
    # The first may end before it has begun where the machine is busy.
    for timeout_s in (1.0, 4.0, 16.0, 64.0):
        _, error = run_interpreter(["-c", code], timeout_s=timeout_s)
        assert error == f"takes more than {timeout_s:g} s"
        if pid_file.exists() and pid_file.read_text():
            break
    for _ in range(300):
        state = subprocess.run(["ps", "-o", "stat=", "-p", pid_file.read_text()], capture_output=True, text=True).stdout
        if not state.strip() or state.startswith("Z"):
            return
        time.sleep(0.1)
    raise AssertionError(f"the process is still there: {state}")
