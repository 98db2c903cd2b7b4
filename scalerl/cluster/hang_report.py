"""Reports why ranks do not answer: which is missing, in which phase or collective, and the stacks of all ranks."""

from __future__ import annotations

import contextlib
import json
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

import psutil

from scalerl.cluster.heartbeat import IDLE, INTERVAL_S, BeatFiles
from scalerl.cluster.worker_logs import FETCH_TIMEOUT_S, ActorPlace, on_node, place_of_actor, session_logs

# How long a heartbeat thread, which looks once in INTERVAL_S, has to answer: on a loaded machine it needs seconds. Only
# a rank that does not answer costs all of it. The rest of what a node has for its part is for the start of the process
# that looks, and for py-spy.
ANSWER_S = FETCH_TIMEOUT_S / 3
# A process whose beat is older does not run.
STALE_S = 10 * INTERVAL_S
NODES_AT_A_TIME = 32
PY_SPY_TIMEOUT_S = 10.0
# Lines of a stack that are in the message; all are in the file.
SHOWN_LINES = 12
RUNS, GONE = "runs", "gone"
NOT_RUNNING = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP, psutil.STATUS_ZOMBIE)


@dataclass(frozen=True, order=True)
class Collective:
    """A collective that a rank has begun and not ended.  call: its number among the collectives of its group."""

    name: str
    group: str
    call: int

    def __str__(self) -> str:
        return f"{self.name} of group {self.group} (its call {self.call})"


@dataclass(frozen=True)
class RankState:
    """What is known of one rank.

    phase_s, beat_s: seconds since the phase and the last beat began.  flight: torch's traces by backend.
    """

    rank: int
    where: str
    process: str
    phase: str = IDLE
    phase_s: float = 0.0
    beat_s: float = 0.0
    stacks: str = ""
    flight: dict[str, Any] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        return self.process == RUNS and self.beat_s < STALE_S

    @property
    def waits_in(self) -> list[Collective]:
        """The collectives of the flight record that have not ended."""
        waits = set[Collective]()
        for backend, trace in self.flight.items():
            for entry in trace.get("entries", ()):
                if not entry["retired"] and entry["state"] != "completed":
                    name = entry["profiling_name"] or backend
                    waits.add(Collective(name, _group(*entry["process_group"]), entry["collective_seq_id"]))
        return sorted(waits)

    def members(self, group: str) -> set[int] | None:
        """The ranks of a group, if the flight record has it."""
        for trace in self.flight.values():
            for config in trace.get("pg_config", {}).values():
                if _group(config["name"], config["desc"]) == group:
                    return set(map(int, re.findall(r"\d+", str(config["ranks"]))))
        return None

    def line(self) -> str:
        late = "" if self.beat_s < STALE_S else f", no beat for {self.beat_s:.0f} s"
        inside = f", in {', '.join(map(str, self.waits_in))}" if self.waits_in else ""
        return f"rank {self.rank} ({self.where}): {self.process}{late}; {self.phase} for {self.phase_s:.0f} s{inside}"


def _group(name: str, description: str) -> str:
    """Number and purpose of a process group; the number is the same on all ranks."""
    return f"{name} {description}".strip()


# --- on the node of the ranks ---


def seen_on_node(logs: str, pids: Sequence[int]) -> list[dict[str, Any]]:
    """Fields of RankState for each process, from its heartbeat and, if it still answers, from the process itself."""
    files = [BeatFiles.of(Path(logs), pid) for pid in pids]
    asked = [each.ask for pid, each in zip(pids, files, strict=True) if _ask(pid, each)]
    deadline = time.monotonic() + ANSWER_S
    while any(ask.exists() for ask in asked) and time.monotonic() < deadline:
        time.sleep(INTERVAL_S / 10)
    with ThreadPoolExecutor(len(pids)) as pool:
        return list(pool.map(_seen, pids, files))


def _ask(pid: int, files: BeatFiles) -> bool:
    files.answer.unlink(missing_ok=True)
    if process_state(pid) != RUNS or not files.beat.exists():
        return False
    files.ask.touch()
    return True


def _seen(pid: int, files: BeatFiles) -> dict[str, Any]:
    seen: dict[str, Any] = {"process": process_state(pid)}
    with contextlib.suppress(OSError, ValueError):
        beat, now = json.loads(files.beat.read_text(encoding="utf-8")), time.time()
        seen |= {"phase": beat["phase"], "phase_s": now - beat["since"], "beat_s": max(0.0, now - beat["at"])}
    try:
        seen |= json.loads(files.answer.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        seen["stacks"] = stacks_by_py_spy(pid)
    files.ask.unlink(missing_ok=True)
    return seen


def stacks_by_py_spy(pid: int) -> str:
    """The stacks of a process that does not answer, as one that is stopped; "" where py-spy is not installed or may not
    read the process."""
    installed = Path(sys.executable).with_name("py-spy")
    if (py_spy := str(installed) if installed.exists() else shutil.which("py-spy")) is not None:
        # A stopped process must not be waited for.
        command = [py_spy, "dump", "--nonblocking", "--pid", str(pid)]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_TIMEOUT_S, check=False)
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout.strip()
    return ""


def process_state(pid: int) -> str:
    """A process's state: RUNS, GONE or one of NOT_RUNNING."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return GONE
    return status if status in NOT_RUNNING else RUNS


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
        suspects = [state for state in self.states if state.rank == self.suspect]
        others = [state for state in self.states if state.rank != self.suspect and state.stacks]
        for state in suspects + others[:1]:
            if state.stacks:
                lines += [f"Stack of rank {state.rank}:", *(f"  {line}" for line in _calling_thread(state.stacks))]
        return "\n".join(lines)

    def write(self, directory: Path, method: str) -> Path:
        """Writes the report with the stacks of all ranks, and torch's flight record of each rank in a file by it."""
        stem = f"hang-{method}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        directory.mkdir(parents=True, exist_ok=True)
        parts = [self.verdict, *(state.line() for state in self.states)]
        parts += [f"\n===== rank {state.rank}: stacks\n{state.stacks or '(none)'}" for state in self.states]
        path = directory / f"{stem}.txt"
        path.write_text("\n".join(parts) + "\n", encoding="utf-8")
        for state in self.states:
            if state.flight:
                flight = directory / f"{stem}-rank-{state.rank}.flight.json"
                flight.write_text(json.dumps(state.flight), encoding="utf-8")
        return path


def report_of(ranks: Sequence[Any], places: Sequence[str]) -> HangReport:
    """Asks the nodes of all ranks at the same time, and judges which rank is missing.

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
        RankState(rank, f"{places[rank]}, process {processes[rank].pid} on {processes[rank].address}", **seen)
        for node, node_ranks in by_node.items()
        for rank, seen in zip(node_ranks, answers[node], strict=True)
    ]
    return judged(sorted(states, key=lambda state: state.rank))


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
    members = next((known for state in states if (known := state.members(collective.group)) is not None), None)
    absent = [
        state
        for state in states
        if state.rank not in inside and (members is None or state.rank in members) and state.phase != IDLE
    ]
    # A rank that is not alive is the likeliest cause, then a rank that waits for nobody.
    absent.sort(key=lambda state: (state.is_alive, bool(state.waits_in), state.rank))
    if not absent:
        return HangReport(f"ranks {inside} are all in {collective}, which does not end: the network?", None, states)
    missing = [state.rank for state in absent]
    verdict = f"missing in {collective}, in which ranks {inside} wait: {missing}; first of them {absent[0].line()}"
    return HangReport(verdict, absent[0].rank, states)


def _calling_thread(stacks: str) -> list[str]:
    """The first lines of the thread that does the call, the main one: faulthandler writes it last."""
    threads = stacks.split("\n\n")
    by_py_spy = re.match(r"Process (\d+):", stacks)
    main = f"Thread {by_py_spy[1]} " if by_py_spy else ""
    thread = next((text for text in threads if main and text.startswith(main)), threads[-1]).splitlines()
    return thread[: SHOWN_LINES + 1]
