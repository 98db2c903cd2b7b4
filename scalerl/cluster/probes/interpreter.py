"""Programs in a separate interpreter, so that a crash or a hang of what they import becomes a message."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

TIMEOUT_S = 180.0
PROGRAMS = "scalerl.cluster.probes.programs"


def run_interpreter(
    arguments: Sequence[str], timeout_s: float = TIMEOUT_S, env: Mapping[str, str] | None = None
) -> tuple[str, str | None]:
    """Runs Python with these arguments; returns its standard output and an error, also if it crashed or hung.

    env: variables to add.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}, start_new_session=True,
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # Ends the processes that it started, too.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "", f"takes more than {timeout_s:g} s"
    if process.returncode == 0:
        return out, None
    lines = [line for line in errors.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "no message"
    return out, f"killed by signal {-process.returncode}: {last}" if process.returncode < 0 else last


def run_probe_program(
    name: str, *arguments: str, timeout_s: float = TIMEOUT_S, env: Mapping[str, str] | None = None
) -> tuple[str, str | None]:
    """Runs a program of `scalerl.cluster.probes.programs`; as `run_interpreter`."""
    return run_interpreter(["-m", f"{PROGRAMS}.{name}", *arguments], timeout_s, env)
