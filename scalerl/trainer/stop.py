"""How a run is asked to end: SIGUSR1 (a scheduler's notice) ends it after the step, SIGTERM at once."""

from __future__ import annotations

import signal
import sys
import threading

# What the Slurm launcher takes as "put me back in the queue".
EXIT_REQUEUE = 75


class StopRequest:
    """`requested` turns true at SIGUSR1: the step in progress ends, a checkpoint is written, the run exits 75."""

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        """Installs the handlers; from the main thread only."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._after_step)
            signal.signal(signal.SIGTERM, self._now)

    def _after_step(self, *_: object) -> None:
        self.requested = True

    def _now(self, *_: object) -> None:
        # An exception, so that servers and workers are ended on the way out.
        sys.exit(128 + signal.SIGTERM)
