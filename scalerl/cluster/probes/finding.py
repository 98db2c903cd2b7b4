"""`Finding`, which a probe returns, and the ways to make probes: several at once, or as programs in processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

AT_A_TIME = 4


@dataclass(frozen=True)
class Finding:
    """The result of a probe.

    ok: False where a run would fail, be slower or lack something.  value: what was found.  meaning: for a run; where
    ok is False also what to do.  needed: a run on this machine fails unless ok is True.
    """

    name: str
    ok: bool
    value: str
    meaning: str
    needed: bool = False

    @property
    def ends_a_run(self) -> bool:
        return self.needed and not self.ok

    def __str__(self) -> str:
        state = "ok" if self.ok else "FAILS" if self.needed else "no"
        return f"{self.name:<20} {state:<5} {self.value}; {self.meaning}"


def side_by_side(probes: Sequence[Callable[[], Finding]], at_a_time: int = AT_A_TIME) -> list[Finding]:
    """The findings in the order of the probes, of which some run at the same time."""
    with ThreadPoolExecutor(max_workers=at_a_time) as pool:
        return list(pool.map(lambda probe: probe(), probes))


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
