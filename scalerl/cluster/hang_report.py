"""Reports why ranks do not answer: which is missing, in which phase or collective, and the stacks of all ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scalerl.cluster.heartbeat import IDLE, INTERVAL_S, STACKS_SIGNAL, BeatFiles
from scalerl.cluster.worker_logs import FETCH_TIMEOUT_S, ActorPlace, on_node, place_of_actor, session_logs

# How long a heartbeat thread, which looks once in INTERVAL_S, has to write its flight record: on a loaded machine it
# needs seconds. Only a rank that does not answer costs all of it. The rest of what a node has for its part is for the
# start of the process that looks, and for py-spy.
ANSWER_S = FETCH_TIMEOUT_S / 3
# A process whose beat is older does not run.
STALE_S = 10 * INTERVAL_S
NODES_AT_A_TIME = 32
PY_SPY_TIMEOUT_S = 10.0
# Lines of a stack that are in the message; all are in the file.
SHOWN_LINES = 12
PROC = Path("/proc")
PROCESS_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "in an uninterruptible wait", "Z": "dead"}


@dataclass(frozen=True, order=True)
class Collective:
    """A collective that a rank has begun and not ended.  call: its number among the collectives of its group."""

    name: str
    group: str
    call: int


@dataclass(frozen=True)
class RankState:
    """What is known of one rank.

    phase_s, beat_s: seconds since the phase and the last beat began.  members: ranks of each group, where known.
    """

    rank: int
    where: str
    process: str
    phase: str = IDLE
    phase_s: float = 0.0
    beat_s: float = 0.0
    stacks: str = ""
    waits_in: tuple[Collective, ...] = ()
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    flight: str = ""

    @property
    def is_alive(self) -> bool:
        return self.process == "runs" and self.beat_s < STALE_S

    def line(self) -> str:
        late = "" if self.beat_s < STALE_S else f", no beat for {self.beat_s:.0f} s"
        waits = ", ".join(f"{each.name} of group {each.group} (its call {each.call})" for each in self.waits_in)
        inside = f", in {waits}" if waits else ""
        return f"rank {self.rank} ({self.where}): {self.process}{late}; {self.phase} for {self.phase_s:.0f} s{inside}"


# --- on the node of the ranks ---


def seen_on_node(logs: str, pids: Sequence[int]) -> list[dict[str, Any]]:
    """Fields of RankState for each process, from its beat, from /proc and, if it still answers, from itself."""
    files = {pid: BeatFiles.of(Path(logs), pid) for pid in pids}
    processes = {pid: process_state(pid) for pid in pids}
    size_before = {pid: _size(files[pid].stacks) for pid in pids}
    waiting = []
    for pid in pids:
        if processes[pid] == "runs" and files[pid].beat.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
                files[pid].flight.unlink(missing_ok=True)
                files[pid].ask.touch()
                waiting.append(pid)
    deadline, sizes = time.monotonic() + ANSWER_S, size_before
    while waiting and time.monotonic() < deadline:
        time.sleep(INTERVAL_S / 10)
        # They are written beside the answer by another thread, line by line, and end with the main thread's.
        before, sizes = sizes, {pid: _size(files[pid].stacks) for pid in waiting}
        waiting = [
            pid for pid in waiting if files[pid].ask.exists() or not size_before[pid] < before[pid] == sizes[pid]
        ]
    seen = {pid: _seen(files[pid], processes[pid], size_before[pid]) for pid in pids}
    # Those that are stopped, or were meanwhile.
    silent = [pid for pid in pids if not seen[pid].get("stacks")]
    with ThreadPoolExecutor(max(1, len(silent))) as pool:
        for pid, stacks in zip(silent, pool.map(stacks_from_outside, silent), strict=True):
            seen[pid]["stacks"] = stacks
    return list(seen.values())


def stacks_from_outside(pid: int) -> str:
    """The stacks of a process that cannot write them itself, as one that is stopped; "" of one that is gone.

    Those of py-spy, where it is installed and may read the process; else those of the kernel, of each thread.
    """
    if (py_spy := find_py_spy()) is not None:
        # A stopped process must not be waited for.
        command = [py_spy, "dump", "--nonblocking", "--pid", str(pid)]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_TIMEOUT_S, check=False)
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout.strip()
    lines = []
    # The main thread first, whose lines a message shows: numbers begin again at the smallest after the largest.
    tasks = sorted((PROC / str(pid) / "task").glob("*"), key=lambda path: (path.name != str(pid), int(path.name)))
    for task in tasks:
        state = re.search(r"^State:\s*(.+)$", _read(task / "status"), re.MULTILINE)
        if state is None:
            continue
        waits = _read(task / "wchan").strip("0\n")
        lines.append(f"thread {task.name} ({_read(task / 'comm').strip()}): {state[1]}" + f", in {waits}" * bool(waits))
        # Root alone may read it.
        lines += [f"  {line}" for line in _read(task / "stack").splitlines()]
    return "\n".join(["no Python stack without py-spy; in the kernel:", *lines]) if lines else ""


def find_py_spy() -> str | None:
    """The path of py-spy, which is looked for beside Python first; None where it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def process_state(pid: int) -> str:
    """A process's state in words: `runs`, `gone` or a value of PROCESS_STATES."""
    try:
        letter = (PROC / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return PROCESS_STATES.get(letter, "runs")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _seen(files: BeatFiles, process: str, size_before: int) -> dict[str, Any]:
    seen: dict[str, Any] = {"process": process}
    now = time.time()
    with contextlib.suppress(OSError, ValueError):
        beat = json.loads(files.beat.read_text(encoding="utf-8"))
        seen |= {"phase": beat["phase"], "phase_s": now - beat["since"], "beat_s": max(0.0, now - beat["at"])}
    with contextlib.suppress(OSError), files.stacks.open(encoding="utf-8", errors="replace") as stacks:
        stacks.seek(size_before)
        seen["stacks"] = stacks.read().strip()
    with contextlib.suppress(OSError):
        seen["flight"] = "" if files.ask.exists() else files.flight.read_text(encoding="utf-8")
    files.ask.unlink(missing_ok=True)
    return seen


# --- in the driver ---


@dataclass(frozen=True)
class HangReport:
    """Why ranks do not answer.

    verdict: one line.  suspect: the rank that the others wait for, or that does not answer; None: not known.
    """

    verdict: str
    suspect: int | None
    states: list[RankState]

    def message(self) -> str:
        """The verdict, a line for each rank, and the stacks of the suspect and of one other rank."""
        lines = [self.verdict, *(f"  {state.line()}" for state in self.states)]
        waiting = next((state for state in self.states if state.rank != self.suspect and state.stacks), None)
        for state in [state for state in self.states if state.rank == self.suspect] + ([waiting] if waiting else []):
            if state.stacks:
                lines += [f"Stack of rank {state.rank}:", *(f"  {line}" for line in _calling_thread(state.stacks))]
        return "\n".join(lines)

    def write(self, directory: Path, method: str) -> Path:
        """Writes the report with the stacks of all ranks, and beside it torch's flight record of each rank."""
        stem = f"hang-{method}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        directory.mkdir(parents=True, exist_ok=True)
        parts = [self.verdict, *(state.line() for state in self.states)]
        parts += [f"\n===== rank {state.rank}: stacks\n{state.stacks or '(none)'}" for state in self.states]
        path = directory / f"{stem}.txt"
        path.write_text("\n".join(parts) + "\n", encoding="utf-8")
        for state in self.states:
            if state.flight:
                (directory / f"{stem}-rank-{state.rank}.flight.json").write_text(state.flight, encoding="utf-8")
        return path


def report_of(ranks: Sequence[Any], places: Sequence[str]) -> HangReport:
    """Asks the nodes of all ranks, side by side, and judges which rank is missing.

    ranks: handles of all ranks, in order.  places: where each rank is in the layout, for the message.
    """
    processes: dict[int, ActorPlace] = {rank: place_of_actor(actor) for rank, actor in enumerate(ranks)}
    by_node: dict[str, list[int]] = {}
    for rank, process in processes.items():
        by_node.setdefault(process.node, []).append(rank)
    logs = str(session_logs())

    def ask(node: str) -> list[dict[str, Any]]:
        try:
            return on_node(node, seen_on_node, logs, [processes[rank].pid for rank in by_node[node]])
        except Exception as error:
            said = f"its node does not answer ({type(error).__name__})"
            return [{"process": said} for _ in by_node[node]]

    with ThreadPoolExecutor(min(len(by_node), NODES_AT_A_TIME)) as pool:
        answers = dict(zip(by_node, pool.map(ask, by_node), strict=True))
    states = [
        _state(rank, f"{places[rank]}, process {processes[rank].pid} on {processes[rank].address}", seen)
        for node, node_ranks in by_node.items()
        for rank, seen in zip(node_ranks, answers[node], strict=True)
    ]
    return judged(sorted(states, key=lambda state: state.rank))


def _state(rank: int, where: str, seen: dict[str, Any]) -> RankState:
    waits_in, members = unfinished(seen.get("flight", ""))
    return RankState(rank, where, **seen, waits_in=waits_in, members=members)


def unfinished(flight: str) -> tuple[tuple[Collective, ...], dict[str, tuple[int, ...]]]:
    """The collectives of a flight record that have not ended, and the ranks of the groups that it knows."""
    waits_in, members = set[Collective](), dict[str, tuple[int, ...]]()
    for backend, trace in (json.loads(flight) if flight else {}).items():
        for entry in trace.get("entries", ()):
            if not entry["retired"] and entry["state"] != "completed":
                # (number, what it is for): the number is the same on all ranks.
                group, described = entry["process_group"]
                name = entry["profiling_name"] or backend
                waits_in.add(Collective(name, f"{group} {described}".strip(), entry["collective_seq_id"]))
        for config in trace.get("pg_config", {}).values():
            ranks = tuple(int(number) for number in re.findall(r"\d+", str(config["ranks"])))
            members[f"{config['name']} {config['desc']}".strip()] = ranks
    return tuple(sorted(waits_in)), members


def judged(states: list[RankState]) -> HangReport:
    """Judges which rank the others wait for, in the collective in which most ranks wait."""
    waiting: dict[Collective, list[int]] = {}
    for state in states:
        for collective in state.waits_in:
            waiting.setdefault(collective, []).append(state.rank)
    if not waiting:
        silent = [state for state in states if not state.is_alive]
        busy = silent or [state for state in states if state.phase != IDLE]
        if not busy:
            return HangReport("no rank is in a call", None, states)
        named = "is not alive" if silent else "is in no collective and does not come back"
        return HangReport(f"rank {busy[0].rank} {named}: {busy[0].line()}", busy[0].rank, states)
    collective, inside = max(waiting.items(), key=lambda item: len(item[1]))
    members = next((state.members[collective.group] for state in states if collective.group in state.members), None)
    absent = [
        state
        for state in states
        if state.rank not in inside and (members is None or state.rank in members) and state.phase != IDLE
    ]
    # A rank that is not alive is the likeliest cause, then a rank that waits for nobody.
    absent.sort(key=lambda state: (state.is_alive, bool(state.waits_in), state.rank))
    what = f"{collective.name} of group {collective.group} (its call {collective.call})"
    if not absent:
        return HangReport(f"ranks {inside} are all in {what}, which does not end: the network?", None, states)
    missing = [state.rank for state in absent]
    verdict = f"missing in {what}, in which ranks {inside} wait: {missing}; first of them {absent[0].line()}"
    return HangReport(verdict, absent[0].rank, states)


def _calling_thread(stacks: str) -> list[str]:
    """The first lines of the thread that does the call, the main one: faulthandler writes it last."""
    threads = stacks.split("\n\n")
    by_py_spy = re.match(r"Process (\d+):", stacks)
    main = f"Thread {by_py_spy[1]} " if by_py_spy else ""
    thread = next((text for text in threads if main and text.startswith(main)), threads[-1]).splitlines()
    return thread[: SHOWN_LINES + 1]
