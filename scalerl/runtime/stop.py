"""How a run is asked to end: SIGUSR1 (a scheduler's notice) ends it after the step, SIGTERM at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# What the Slurm launcher takes as "put me back in the queue".
EXIT_REQUEUE = 75
# As a shell reports a process that SIGTERM ended.
EXIT_TERMINATED = 128 + signal.SIGTERM
TERMINATED = (
    "Terminated (SIGTERM): all that the run had started has ended. The same command goes on from what was saved."
)


class StopRequest:
    """`requested` turns true at SIGUSR1: the step in progress ends, a checkpoint is written, the run exits 75.

    SIGTERM interrupts whatever runs, as Ctrl-C does; what is inside `listening` ends on the way out, and the exit code
    is 143.
    """

    def __init__(self) -> None:
        self.requested = self.terminated = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The handlers are installed inside the block; from another thread than the main one nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
        signal.signal(signal.SIGUSR1, self._after_step)
        signal.signal(signal.SIGTERM, self._now)
        try:
            yield
        except BaseException:
            # Whatever it is, the interrupt made it: a call that it cut short may fail in its own way.
            if not self.terminated:
                raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.terminated:
            print(TERMINATED, file=sys.stderr)
            sys.exit(EXIT_TERMINATED)

    def _after_step(self, *_: object) -> None:
        self.requested = True

    def _now(self, *_: object) -> None:
        # Ray's own handler below Python's, where it is installed for a moment, gives the process three seconds.
        signal.alarm(0)
        if self.terminated:
            # A second one must not cut short what the first began.
            return
        # Where the exception gets lost, as in a destructor, the run ends after the step.
        self.terminated = self.requested = True
        # Not SystemExit: of the two only this one comes out of Ray's waits as it went in.
        raise KeyboardInterrupt
