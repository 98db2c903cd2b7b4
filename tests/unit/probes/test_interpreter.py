from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from scalerl.probes.interpreter import run_python


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11: no message"),
        ("raise OSError('libfoo.so: undefined symbol')", "OSError: libfoo.so: undefined symbol"),
        ("raise SystemExit(3)", "no message"),
    ],
)
def test_crash_of_an_import_is_an_error_here(code: str, error: str) -> None:
    assert run_python(["-c", code]) == ("", error)


def test_what_hangs_is_ended_with_its_own_processes(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess; process = subprocess.Popen(['sleep', '60']); "
        f"open({str(pid_file)!r}, 'w').write(str(process.pid)); process.wait()"
    )
    _, error = run_python(["-c", code], timeout_s=1.0)
    assert error == "takes more than 1 s"
    for _ in range(50):
        state = subprocess.run(["ps", "-o", "stat=", "-p", pid_file.read_text()], capture_output=True, text=True).stdout
        if not state.strip() or state.startswith("Z"):
            return
        time.sleep(0.1)
    raise AssertionError(f"the process is still there: {state}")
