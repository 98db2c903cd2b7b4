"""Who waits for the call gets what it gives or raises; a process ends without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scalerl.base.threads import in_daemon


def test_the_waiting_get_the_result_or_the_error() -> None:
    assert in_daemon(lambda: 7, "seven").result(timeout=20) == 7
    with pytest.raises(ZeroDivisionError):
        in_daemon(lambda: 1 / 0, "fails").result(timeout=20)


def test_a_process_ends_without_it() -> None:
    code = "import time; from scalerl.base.threads import in_daemon; in_daemon(lambda: time.sleep(1000), 'long')"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
