"""Who is missing, from what ranks say of themselves; real ranks: tests/ray/test_hangs.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scalerl.cluster.hang_report import (
    ANSWER_S,
    PY_SPY_TIMEOUT_S,
    SHOWN_LINES,
    Collective,
    RankState,
    judged,
    process_state,
    seen_on_node,
    stacks_from_outside,
    unfinished,
)
from scalerl.cluster.heartbeat import IDLE, BeatFiles
from scalerl.cluster.worker_logs import FETCH_TIMEOUT_S
from tests.lanes import full

REDUCE = Collective("gloo:all_reduce", "3 tp", 7)
GATHER = Collective("gloo:all_gather", "0 dp", 2)


def state(rank: int, *waits_in: Collective, process: str = "runs", phase: str = "update_actor", **more: object):
    return RankState(rank, f"dp_rank={rank}", process, phase=phase, phase_s=5.0, waits_in=waits_in, **more)


def test_a_stopped_rank_is_before_one_that_waits_elsewhere() -> None:
    states = [state(0, REDUCE), state(1, GATHER), state(2, REDUCE), state(3, process="stopped")]
    report = judged(states)
    assert report.suspect == 3
    assert report.verdict.startswith("missing in gloo:all_reduce of group 3 tp (its call 7), in which ranks [0, 2] ")
    assert "wait: [3, 1]; first of them rank 3 (dp_rank=3): stopped; update_actor for 5 s" in report.verdict


def test_ranks_of_other_groups_are_not_missed() -> None:
    report = judged([state(0, REDUCE, members={"3 tp": (0, 1)}), state(1), state(2, process="stopped")])
    assert report.suspect == 1
    assert "wait: [1]; first of them rank 1" in report.verdict


def test_all_are_there() -> None:
    report = judged([state(0, REDUCE), state(1, REDUCE)])
    assert report.suspect is None and "ranks [0, 1] are all in gloo:all_reduce" in report.verdict


def test_without_a_collective() -> None:
    report = judged([state(0, phase=IDLE), state(1)])
    assert report.suspect == 1 and "rank 1 is in no collective and does not come back" in report.verdict
    silent = judged([state(0), state(1, beat_s=60.0)])
    assert silent.suspect == 1 and "no beat for 60 s" in silent.verdict


def test_a_flight_record_is_read() -> None:
    def entry(name: str, call: int, **more: object) -> dict[str, object]:
        given = {"profiling_name": name, "collective_seq_id": call, "process_group": ["4", "dp"], "retired": False}
        return given | {"state": "started"} | more

    entries = [entry("nccl:all_reduce", 1, retired=True), entry("nccl:broadcast", 2, state="completed"),
               entry("nccl:all_reduce", 3)]  # fmt: skip
    flight = json.dumps(
        {"nccl": {"entries": entries, "pg_config": {"4": {"name": "4", "desc": "dp", "ranks": "[0, 5]"}}}}
    )
    assert unfinished(flight) == ((Collective("nccl:all_reduce", "4 dp", 3),), {"4 dp": (0, 5)})
    assert unfinished("") == ((), {})


def test_processes_that_run_stop_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without py-spy: what the kernel shows of one that is stopped."""
    monkeypatch.setattr("scalerl.cluster.hang_report.find_py_spy", lambda: None)
    child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
    try:
        assert child.stdout is not None and child.stdout.readline()
        assert process_state(child.pid) == "runs"
        os.kill(child.pid, signal.SIGSTOP)
        while process_state(child.pid) == "runs":
            time.sleep(0.01)
        files = BeatFiles.of(tmp_path, child.pid)
        files.beat.write_text(json.dumps({"rank": 0, "phase": "meet", "since": time.time() - 9, "at": time.time() - 8}))
        (seen,) = seen_on_node(str(tmp_path), [child.pid])
        assert (seen["process"], seen["phase"]) == ("stopped", "meet")
        assert 60 > seen["phase_s"] >= 9 and 60 > seen["beat_s"] >= 8
        assert f"\nthread {child.pid} (python" in seen["stacks"] and "): T (stopped)" in seen["stacks"]
    finally:
        child.kill()
        child.wait()
    assert process_state(child.pid) == "gone" and stacks_from_outside(child.pid) == ""


PY_SPY = Path(sys.prefix, "optional/py-spy/bin/py-spy")
HANGS = """
import signal, time
def meets_nobody():
    print(flush=True)
    signal.pause()
meets_nobody()
"""


@pytest.mark.skipif(not PY_SPY.exists(), reason="needs py-spy, which .ci/run installs")
def test_py_spy_shows_the_python_stack_of_a_process_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalerl.cluster.hang_report.find_py_spy", lambda: str(PY_SPY))
    child = subprocess.Popen([sys.executable, "-c", HANGS], stdout=-1)
    try:
        assert child.stdout is not None and child.stdout.readline()
        os.kill(child.pid, signal.SIGSTOP)
        while process_state(child.pid) == "runs":
            time.sleep(0.01)
        stacks = stacks_from_outside(child.pid)
    finally:
        child.kill()
        child.wait()
    assert f"Thread {child.pid}" in stacks and "meets_nobody (" in stacks, stacks


def test_the_main_thread_of_the_kernel_s_is_shown_though_its_number_is_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the numbers of processes began again at the smallest after it; its files lie here as in /proc."""
    monkeypatch.setattr("scalerl.cluster.hang_report.find_py_spy", lambda: None)
    monkeypatch.setattr("scalerl.cluster.hang_report.PROC", tmp_path)
    for number in (32760, *range(300, 300 + 2 * SHOWN_LINES)):
        task = tmp_path / "32760" / "task" / str(number)
        task.mkdir(parents=True)
        (task / "status").write_text("State:\tT (stopped)\n")
        (task / "comm").write_text("python\n")
    message = judged([state(0, process="stopped", stacks=stacks_from_outside(32760)), state(1)]).message()
    shown = message.split("in the kernel:\n")[1].splitlines()
    assert [line.split()[1] for line in shown] == ["32760", *map(str, range(300, 300 + SHOWN_LINES - 1))]


# A process whose stacks are there after half a second, and its flight record after some seconds.
SLOW_TO_WRITE = """
import os, signal, sys, threading, time
from pathlib import Path
from scalerl.cluster.heartbeat import STACKS_SIGNAL, BeatFiles
files = BeatFiles.of(Path(sys.argv[1]), os.getpid())
stacks = files.stacks.open("w")
def write(*_):
    time.sleep(0.5)
    print("Thread 2\\n  meet", file=stacks, flush=True)
def answer():
    while True:
        if files.ask.exists():
            time.sleep(float(sys.argv[2]))
            files.flight.write_text("{}")
            files.ask.unlink()
        time.sleep(0.01)
signal.signal(STACKS_SIGNAL, write)
files.beat.write_text('{"phase": "meet", "since": 0, "at": 0}')
threading.Thread(target=answer, daemon=True).start()
print(flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("flight_s", ["0", full("8", id="8 s, as on a loaded machine")])
def test_stacks_and_a_flight_record_that_come_late_are_waited_for(tmp_path: Path, flight_s: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", SLOW_TO_WRITE, str(tmp_path), flight_s], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        (seen,) = seen_on_node(str(tmp_path), [child.pid])
        assert (seen["stacks"], seen["flight"]) == ("Thread 2\n  meet", "{}")
    finally:
        child.kill()
        child.wait()


def test_py_spy_is_asked_where_it_is_and_the_thread_that_calls_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of its name that prints as it does."""
    dump = "Process 71: python\\n\\nThread 72 (idle)\\n    beat (b.py:1)\\n\\nThread 71 (idle)\\n    meet (w.py:3)"
    dump += "\\n\\nThread 73 (idle)\\n    wait (t.py:9)"
    (tmp_path / "py-spy").write_text(f"#!/bin/sh\n[ \"$1 $2 $3\" = 'dump --nonblocking --pid' ] && printf '{dump}'\n")
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setattr("scalerl.cluster.hang_report.sys.executable", str(tmp_path / "python"))
    stacks = stacks_from_outside(os.getpid())
    report = judged([state(0, process="stopped", stacks=stacks), state(1)])
    assert "Stack of rank 0:\n  Thread 71 (idle)\n      meet (w.py:3)" in report.message()
    assert "beat" not in report.message() and "wait (t.py" not in report.message()


def test_a_node_s_part_of_a_report_ends_before_it_is_given_up() -> None:
    """Half of its time is left to start the process that looks, on a machine that is loaded."""
    assert ANSWER_S + PY_SPY_TIMEOUT_S <= FETCH_TIMEOUT_S / 2
