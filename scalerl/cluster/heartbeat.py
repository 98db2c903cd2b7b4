"""Heartbeat of a rank's process: its phase, rewritten every second, and on demand its stacks and collectives.

All of this is in files in the directory of Ray's logs of that node, so that a process that hangs can be asked, and a
stopped process can be told from a working one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTERVAL_S = 1.0
IDLE = "no call"


@dataclass(frozen=True)
class BeatFiles:
    """The files of one process's heartbeat.

    beat: rewritten every second.  ask: created to request `answer`, and removed when that is written.
    answer: {"stacks": text, "flight": trace of the last collectives by backend}.
    """

    beat: Path
    ask: Path
    answer: Path

    @classmethod
    def of(cls, logs: Path, pid: int) -> BeatFiles:
        return cls(*(logs / f"rank-{pid}.{name}" for name in ("beat", "ask", "answer")))


class Heartbeat:
    """Writes the heartbeat of this process from a daemon thread."""

    def __init__(self, logs: Path) -> None:
        self.files = BeatFiles.of(logs, os.getpid())
        self._phases: list[tuple[str, float]] = [(IDLE, time.time())]
        self._writing = threading.Lock()
        threading.Thread(target=self._beat_for_ever, name="heartbeat", daemon=True).start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phases.append((name, time.time()))
        self.beat()
        try:
            yield
        finally:
            self._phases.pop()
            self.beat()

    def beat(self) -> None:
        name, since = self._phases[-1]
        # A full or lost disk must not end a rank that works.
        with contextlib.suppress(OSError), self._writing:
            _write(self.files.beat, {"phase": name, "since": since, "at": time.time()})

    def _beat_for_ever(self) -> None:
        while True:
            self.beat()
            if self.files.ask.exists():
                with contextlib.suppress(OSError):
                    _write(self.files.answer, {"stacks": _stacks(), "flight": flight_record()})
                    self.files.ask.unlink()
            time.sleep(INTERVAL_S)


def _write(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(json.dumps(content), encoding="utf-8")
    os.replace(partial, path)


def _stacks() -> str:
    """The stacks of all threads of this process."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().strip()


def flight_record() -> dict[str, Any]:
    """The traces of torch's flight recorders for gloo and NCCL in this process: {backend: trace}."""
    traces: dict[str, Any] = {}
    # A process that has not imported torch is in no collective, and must not begin to import it here.
    recorders = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)
    for backend, name in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json")):
        if dump := getattr(recorders, name, None):
            # A trace that torch cannot make must not end the beat.
            with contextlib.suppress(Exception):
                traces[backend] = json.loads(dump(True, False))
    return traces


_own: Heartbeat | None = None


def heartbeat() -> Heartbeat:
    """The heartbeat of this process, which must be a Ray worker; the first call starts it."""
    global _own
    if _own is None:
        import ray

        private: Any = ray._private
        _own = Heartbeat(Path(private.worker._global_node.get_logs_dir_path()))
    return _own
