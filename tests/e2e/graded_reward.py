"""Reward of the e2e runs: every character of the response changes it, so equal scores mean equal texts.

With pause_dir it can stop a run at a chosen sample, with strikes_file it can hit a rollout server: see `jobs.Pause` and
`jobs.Strike`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

from scalerl.rewards.trial import TRIAL_RESPONSE

_lock = threading.Lock()
_num_train_calls = 0


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict | None = None,
    pause_dir: str | None = None,
    strikes_file: str | None = None,
) -> float:
    is_disturbed = pause_dir is not None or strikes_file is not None
    if is_disturbed and extra_info is not None and solution_str != TRIAL_RESPONSE:
        if extra_info["split"] != "train":
            if pause_dir is not None:
                _pause_validation(Path(pause_dir))
            return _score(solution_str)
        called = _count()
        if strikes_file is not None:
            _strike(json.loads(Path(strikes_file).read_text()), called)
        if pause_dir is not None:
            _pause(Path(pause_dir), called)
    return _score(solution_str)


def _score(text: str) -> float:
    return sum((place + 1) * ord(character) for place, character in enumerate(text)) % 101 / 100


def _count() -> int:
    global _num_train_calls
    with _lock:
        _num_train_calls += 1
        return _num_train_calls


def _pause(directory: Path, called: int) -> None:
    while (after := _read_number(directory / "after")) is not None and called > after:
        (directory / f"reached-{after}").touch()
        time.sleep(0.02)
    if (directory / "error").exists():
        raise ValueError((directory / "error").read_text())


def _pause_validation(directory: Path) -> None:
    while (after := _read_number(directory / "validation_after")) is not None and _num_train_calls >= after:
        (directory / "in_validation").touch()
        time.sleep(0.02)


def _read_number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except FileNotFoundError:
        return None


def _strike(strikes: list[dict], called: int) -> None:
    for strike in strikes:
        if strike["at"] != called:
            continue
        if "log" in strike:
            os.killpg(server_of(strike["log"]), strike["signum"])
        elif not Path(strike["done"]).exists():
            # Samples are counted anew after a restart.
            Path(strike["done"]).touch()
            os.kill(int(Path(strike["pid_file"]).read_text()), strike["signum"])


def server_of(log: str) -> int:
    """The process below the supervisor that writes to this log or to that of a restart; it leads its group.

    Of a server that an earlier run started, the log is a link to that run's.
    """
    links = [path for path in Path(log).parent.glob(f"{Path(log).name}*") if path.is_symlink()]
    logs = (log, *(str(path.resolve()) for path in links))
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if state not in "ZX":
                table[int(entry.name)] = (int(parent), words)
    (server,) = (
        pid
        for pid, (parent, words) in table.items()
        if parent in table
        and "scalerl.rollout.servers.supervise" in table[parent][1]
        and any(word.startswith(logs) for word in table[parent][1])
    )
    return server
