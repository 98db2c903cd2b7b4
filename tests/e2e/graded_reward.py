"""Reward of the e2e runs: every character of the response changes it, so equal scores mean equal texts.

With pause_dir it can stop a run at a chosen sample: see `jobs.Pause`.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

_lock = threading.Lock()
_num_train_calls = 0


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, pause_dir: str | None = None
) -> float:
    if pause_dir is not None and extra_info["split"] == "train":
        _pause(Path(pause_dir))
    return sum((place + 1) * ord(character) for place, character in enumerate(solution_str)) % 101 / 100


def _pause(directory: Path) -> None:
    global _num_train_calls
    with _lock:
        _num_train_calls += 1
        called = _num_train_calls
    wanted = directory / "after"
    if wanted.exists() and called > int(wanted.read_text()):
        (directory / "reached").touch()
        while wanted.exists():
            time.sleep(0.02)
