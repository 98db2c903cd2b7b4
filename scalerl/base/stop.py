"""Signals that end a run: SIGUSR1 (a scheduler's notice) after the current step, SIGTERM at once or by a deadline."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

# Exit code that makes the Slurm launcher requeue the job.
EXIT_REQUEUE = 75
# Exit code by which a shell reports a process that SIGTERM ended.
EXIT_TERMINATED = 128 + signal.SIGTERM
Result = TypeVar("Result")
TERMINATED = "Terminated (SIGTERM): all that the run had started has ended."


class StopRequest:
    """Signal handlers by which SIGUSR1 and SIGTERM end a run, and the request that they have received.

    SIGUSR1 sets `requested`: the step in progress ends, a checkpoint is written, the run exits 75.
    SIGTERM interrupts whatever runs, as Ctrl-C does; the contexts inside `listening` are left, and the run exits 143.
    With save_deadline_s above 0 SIGTERM acts as SIGUSR1, and both interrupt when their time was not enough: after
    SIGTERM that many seconds, after SIGUSR1 what the job has left, at least as many. Halfway what runs in `in_time` is
    given up where a save is worth more: then `cut` is set, and the other half is for the save.
    job_left_s: seconds until a scheduler ends the job; None where nobody knows.
    """

    def __init__(self, save_deadline_s: float = 0.0, job_left_s: Callable[[], float | None] = lambda: None) -> None:
        self.requested = self.terminated = False
        self._save_deadline_s, self._job_left_s = save_deadline_s, job_left_s
        # On the monotonic clock; None until a signal has set it.
        self._deadline: float | None = None
        self._is_second_half = False
        self.cut = False
        self._may_cut: Callable[[], bool] = lambda: False

    @property
    def has_deadline(self) -> bool:
        return self._save_deadline_s > 0

    @property
    def is_late(self) -> bool:
        """Whether half of the deadline is over: what is left is for the save."""
        return self._is_second_half

    def in_time(self, work: Callable[[], Result], may_cut: Callable[[], bool] = lambda: True) -> Result | None:
        """Returns what `work` returns; None where half of the deadline was over before it, or was over meanwhile.

        may_cut: whether it may be given up, asked at that moment.
        """
        self._may_cut = may_cut
        try:
            if self.is_late and may_cut():
                self.cut = True
                return None
            return work()
        except KeyboardInterrupt:
            if not self.cut or self.terminated:
                raise
            return None
        finally:
            self._may_cut = lambda: False

    @contextmanager
    def listening(self, how_to_continue: str = "") -> Iterator[None]:
        """Installs the handlers for the block; does nothing in a thread other than the main one.

        how_to_continue: printed after SIGTERM has ended the block; empty: the caller prints it (SystemExit with 143).
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM)
        before = {number: signal.getsignal(number) for number in numbers}
        signal.signal(signal.SIGUSR1, self._after_step)
        signal.signal(signal.SIGTERM, self._by_deadline if self.has_deadline else self._now)
        signal.signal(signal.SIGALRM, self._on_alarm)
        try:
            yield
        except BaseException as error:
            # Ray's own handler has cut its start short, so there is nothing to save.
            if self._deadline is not None and isinstance(error, SystemExit) and error.code == signal.SIGTERM:
                self.terminated = True
            # Any exception here comes from the interrupt, as an interrupted call may fail in its own way.
            if not self.terminated:
                raise
        finally:
            if self._deadline is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.terminated:
            print(f"{TERMINATED} {how_to_continue}".rstrip(), file=sys.stderr, flush=True)
            sys.exit(EXIT_TERMINATED)

    def _after_step(self, *_: object) -> None:
        self.requested = True
        # A launcher repeats the notice, which does not begin anew.
        if self.has_deadline and self._deadline is None:
            self._set_deadline(max(self._save_deadline_s, self._job_left_s() or 0.0))

    def _by_deadline(self, *_: object) -> None:
        self.requested = True
        # Nor does a second SIGTERM; one after SIGUSR1 may leave less time.
        if self._deadline is None or time.monotonic() + self._save_deadline_s < self._deadline:
            self._set_deadline(self._save_deadline_s)

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        signal.setitimer(signal.ITIMER_REAL, seconds if self._is_second_half else seconds / 2)

    def _on_alarm(self, *_: object) -> None:
        # Without a deadline it is that of Ray's own handler, as below.
        if self._deadline is None or self._is_second_half:
            self._now()
            return
        self._is_second_half = True
        # 0 would be no alarm.
        signal.setitimer(signal.ITIMER_REAL, max(1e-3, self._deadline - time.monotonic()))
        if self._may_cut():
            self.cut = True
            raise KeyboardInterrupt

    def _now(self, *_: object) -> None:
        # Ray's handler, if installed at this moment below Python's, sets an alarm that ends the process in 3 seconds.
        signal.alarm(0)
        if self.terminated:
            # A second signal must not interrupt the ending that the first one began.
            return
        # If the exception is lost, as in a destructor, the run ends after the step.
        self.terminated = self.requested = True
        # Not SystemExit, which Ray's waits do not pass on unchanged.
        raise KeyboardInterrupt
