"""Who is missing, from what ranks say of themselves; real ranks: tests/ray/test_hangs.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalerl.cluster import hang_report
from scalerl.cluster.hang_report import Collective, RankState, judged, process_state, seen_on_node, stacks_by_py_spy
from scalerl.cluster.heartbeat import IDLE, BeatFiles
from tests.lanes import full

REDUCE = Collective("gloo:all_reduce", "3 tp", 7)
GATHER = Collective("gloo:all_gather", "0 dp", 2)


def entry_of(collective: Collective, **more: object) -> dict[str, object]:
    """An entry of torch's flight record."""
    given = {"profiling_name": collective.name, "collective_seq_id": collective.call, "retired": False}
    return given | {"process_group": collective.group.split(), "state": "started"} | more


def state(rank: int, *waits_in: Collective, process: str = "runs", phase: str = "update_actor", **more: object):
    groups = {"3": {"name": "3", "desc": "tp", "ranks": more.pop("ranks", "[0, 1, 2, 3]")}}
    flight = {"gloo": {"entries": list(map(entry_of, waits_in)), "pg_config": groups}} if waits_in else {}
    return RankState(rank, f"dp_rank={rank}", process, phase=phase, phase_s=5.0, flight=flight, **more)


def test_a_stopped_rank_is_before_one_that_waits_elsewhere() -> None:
    states = [state(0, REDUCE), state(1, GATHER), state(2, REDUCE), state(3, process="stopped")]
    report = judged(states)
    assert report.suspect == 3
    assert report.verdict.startswith("missing in gloo:all_reduce of group 3 tp (its call 7), in which ranks [0, 2] ")
    assert "wait: [3, 1]; first of them rank 3 (dp_rank=3): stopped; update_actor for 5 s" in report.verdict


def test_ranks_of_other_groups_are_not_missed() -> None:
    report = judged([state(0, REDUCE, ranks="[0, 1]"), state(1), state(2, process="stopped")])
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
    ended, left = Collective("nccl:all_reduce", "4 dp", 1), Collective("nccl:all_reduce", "4 dp", 3)
    entries = [entry_of(ended, retired=True), entry_of(ended, state="completed"), entry_of(left)]
    groups = {"4": {"name": "4", "desc": "dp", "ranks": "[0, 5]"}}
    read = RankState(0, "", "runs", flight={"nccl": {"entries": entries, "pg_config": groups}})
    assert read.waits_in == [left] and read.members("4 dp") == {0, 5} and read.members("3 tp") is None
    assert RankState(0, "", "runs").waits_in == []


HANGS = """
import signal
def meets_nobody():
    print(flush=True)
    signal.pause()
meets_nobody()
"""


@pytest.fixture
def stopped() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is stopped in its function meets_nobody."""
    child = subprocess.Popen([sys.executable, "-c", HANGS], stdout=-1)
    try:
        assert child.stdout is not None and child.stdout.readline()
        assert process_state(child.pid) == "runs"
        os.kill(child.pid, signal.SIGSTOP)
        while process_state(child.pid) == "runs":
            time.sleep(0.01)
        yield child
    finally:
        child.kill()
        child.wait()


def test_a_process_that_is_stopped_and_gone(tmp_path: Path, stopped: subprocess.Popen[bytes]) -> None:
    files = BeatFiles.of(tmp_path, stopped.pid)
    files.beat.write_text(json.dumps({"phase": "meet", "since": time.time() - 9, "at": time.time() - 8}))
    # Of an earlier report.
    files.answer.write_text('{"stacks": "old", "flight": {}}')
    (seen,) = seen_on_node(str(tmp_path), [stopped.pid])
    assert (seen["process"], seen["phase"]) == ("stopped", "meet") and seen["stacks"] != "old"
    assert 60 > seen["phase_s"] >= 9 and 60 > seen["beat_s"] >= 8
    stopped.kill()
    stopped.wait()
    assert process_state(stopped.pid) == "gone" and stacks_by_py_spy(stopped.pid) == ""


PY_SPY = Path(sys.prefix, "optional/py-spy/bin/py-spy")


@pytest.mark.skipif(not PY_SPY.exists(), reason="needs py-spy, which .ci/run installs")
def test_py_spy_shows_the_python_stack_of_a_process_that_is_stopped(
    stopped: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_report.sys, "executable", str(PY_SPY.with_name("python")))
    stacks = stacks_by_py_spy(stopped.pid)
    assert f"Thread {stopped.pid}" in stacks and "meets_nobody (" in stacks, stacks


# A process that answers after some seconds, as on a loaded machine.
SLOW_TO_ANSWER = """
import os, sys, time
from pathlib import Path
from scalerl.cluster.heartbeat import BeatFiles, Heartbeat
def meet():
    print(flush=True)
    time.sleep(600)
logs = Path(sys.argv[1])
BeatFiles.of(logs, os.getpid()).beat.write_text('{"phase": "meet", "since": 0, "at": 0}')
Heartbeat.beat = lambda self: time.sleep(float(sys.argv[2]))
Heartbeat(logs)
meet()
"""


@pytest.mark.parametrize("late_s", ["0", full("8", id="8 s")])
def test_an_answer_that_comes_late_is_waited_for(tmp_path: Path, late_s: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", SLOW_TO_ANSWER, str(tmp_path), late_s], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        (seen,) = seen_on_node(str(tmp_path), [child.pid])
    finally:
        child.kill()
        child.wait()
    assert "in meet" in seen["stacks"] and seen["flight"] == {}
    assert "in meet" in judged([state(0, stacks=seen["stacks"])]).message()


def test_py_spy_is_asked_where_it_is_and_the_thread_that_calls_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of its name that prints as it does."""
    dump = "Process 71: python\\n\\nThread 72 (idle)\\n    beat (b.py:1)\\n\\nThread 71 (idle)\\n    meet (w.py:3)"
    dump += "\\n\\nThread 73 (idle)\\n    wait (t.py:9)"
    (tmp_path / "py-spy").write_text(f"#!/bin/sh\n[ \"$1 $2 $3\" = 'dump --nonblocking --pid' ] && printf '{dump}'\n")
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setattr(hang_report.sys, "executable", str(tmp_path / "python"))
    stacks = stacks_by_py_spy(os.getpid())
    report = judged([state(0, process="stopped", stacks=stacks), state(1)])
    assert "Stack of rank 0:\n  Thread 71 (idle)\n      meet (w.py:3)" in report.message()
    assert "beat" not in report.message() and "wait (t.py" not in report.message()
