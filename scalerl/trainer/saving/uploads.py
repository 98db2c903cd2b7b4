"""Copies of checkpoints at a URL (`trainer.checkpoint_mirror`), made by a thread while the run goes on."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from scalerl.checkpoint.mirror import Mirror
from scalerl.checkpoint.store import CheckpointWriteError, Kept, step_of


class Uploads:
    """Copies checkpoints to a mirror, one at a time; of several that wait only the newest is copied."""

    def __init__(self, mirror: Mirror, kept: Kept) -> None:
        self._mirror, self._kept = mirror, kept
        self._lock = threading.Lock()
        self._copying: Path | None = None
        self._waiting: Path | None = None
        self._thread: threading.Thread | None = None
        self._news: dict[str, float] = {}
        self._failures: list[CheckpointWriteError] = []

    def add(self, directory: Path) -> None:
        """Copies a checkpoint as soon as the one before it is copied."""
        with self._lock:
            self._waiting = directory
            if self._thread is None:
                # A daemon thread: a process that an interrupt ends does not wait for it.
                self._thread = threading.Thread(target=self._run, name="checkpoint-mirror", daemon=True)
                self._thread.start()

    @property
    def steps(self) -> set[int]:
        """Steps of the checkpoints that are still read."""
        with self._lock:
            names = [path.name for path in (self._copying, self._waiting) if path is not None]
        return {step for name in names if (step := step_of(name)) is not None}

    def wait(self, limit_s: float | None = None) -> None:
        """Waits until all is copied, or for `limit_s`."""
        thread = self._thread
        if thread is not None:
            thread.join(limit_s)

    def news(self) -> tuple[dict[str, float], list[CheckpointWriteError]]:
        """Metrics and failures since the last call."""
        with self._lock:
            news, self._news = self._news, {}
            failures, self._failures = self._failures, []
        return news, failures

    def _run(self) -> None:
        while True:
            with self._lock:
                directory = self._copying = self._waiting
                self._waiting = None
                if directory is None:
                    self._thread = None
                    return
            began = time.monotonic()
            failure = None
            try:
                self._mirror.upload(directory)
                self._mirror.rotate(self._kept)
            except CheckpointWriteError as error:
                failure = error
            with self._lock:
                self._news["checkpoint/upload_s"] = time.monotonic() - began
                if failure is not None:
                    self._news["checkpoint/failed_uploads"] = self._news.get("checkpoint/failed_uploads", 0.0) + 1
                    self._failures.append(failure)
