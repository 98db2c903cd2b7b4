"""`CallThreads`: sync calls outside of the event loop, in as many threads as they need."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# A call that has waited for this long gets a thread of its own. Short calls share one: each change from thread to
# thread costs more than they do.
HELP_S = 0.005


class TooManyHungError(Exception):
    """Raised in place of a call while max_hung others are past their deadline and still run."""


@dataclass(eq=False)
class _Call:
    """A call, from the event loop that waits for it. answer: what it returned; None: it is past its deadline."""

    work: Callable[[], Any]
    timeout_s: float
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]
    came_at: float
    began_at: float = 0.0

    @property
    def deadline(self) -> float:
        return self.began_at + self.timeout_s

    def tell(self, value: Any) -> None:
        if not self.answer.done():
            self.answer.set_result(value)


class CallThreads:
    """Up to num_threads daemon threads that take calls in the order in which these came.

    One takes them all as long as none waits for more than HELP_S; another is woken for each that does. A thread whose
    call is past its deadline is no longer one of them, and ends when that call does.
    """

    def __init__(self, name: str, num_threads: int, max_hung: int) -> None:
        """Starts no thread yet.  max_hung: calls past their deadline that still run, at most."""
        self._name, self._num_threads, self._max_hung = name, num_threads, max_hung
        # Guards all that follows but the timer.
        self._changed = threading.Condition()
        self._waiting: deque[_Call] = deque()
        self._running: set[_Call] = set()
        self._hung: set[_Call] = set()
        # Threads, those of hung calls not among them, and how many of these are awake, or have been woken.
        self._num_started = self._num_awake = 0
        # Wakes that no thread has answered yet.
        self._num_wakes = 0
        self._is_closed = False
        # The next `_look`, when it comes, and in which loop.
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        self._timer_loop: asyncio.AbstractEventLoop | None = None

    @property
    def num_hung(self) -> int:
        """The number of calls past their deadline that still run."""
        return len(self._hung)

    async def call(self, work: Callable[[], Any], timeout_s: float) -> Any:
        """Calls work() in a thread, and returns what it returns, None if that takes longer.

        work: it must not raise, and must not return None.
        timeout_s: counts from the start of the call, without the wait for a thread.

        Raises TooManyHungError.
        """
        loop, now = asyncio.get_running_loop(), time.monotonic()
        call = _Call(work, timeout_s, loop, loop.create_future(), now)
        with self._changed:
            if len(self._hung) >= self._max_hung:
                raise TooManyHungError
            self._waiting.append(call)
            if not self._num_awake:
                self._wake()
        self._look_at(now + min(HELP_S, timeout_s), loop)
        return await call.answer

    def close(self) -> None:
        """Ends the threads, those that run a call when it ends; calls that wait are not made."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # --- in the event loop ---

    def _look_at(self, when: float, loop: asyncio.AbstractEventLoop) -> None:
        """Has `_look` called at that time, or before."""
        if self._timer is not None and self._timer_loop is loop:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer = loop.call_later(when - time.monotonic(), self._look, loop)
        self._timer_at, self._timer_loop = when, loop

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wakes a thread for a call that has waited, and gives up calls that are past their deadline."""
        self._timer, now = None, time.monotonic()
        with self._changed:
            late = [call for call in self._running if call.deadline <= now]
            for call in late:
                self._running.remove(call)
                self._hung.add(call)
                self._num_started -= 1
                self._num_awake -= 1
            refused: list[_Call] = []
            if len(self._hung) >= self._max_hung:
                refused = list(self._waiting)
                self._waiting.clear()
            if self._waiting and (now >= self._waiting[0].came_at + HELP_S or not self._num_awake):
                self._wake()
            next_look = [call.deadline for call in self._running]
            next_look += [now + HELP_S] if self._waiting else []
        for call in late:
            call.tell(None)
        for call in refused:
            if not call.answer.done():
                call.answer.set_exception(TooManyHungError())
        if next_look:
            self._look_at(min(next_look), loop)

    def _wake(self) -> None:
        if self._num_awake < self._num_started:
            self._num_wakes += 1
            self._changed.notify()
        elif self._num_started < self._num_threads:
            self._num_started += 1
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        else:
            return
        self._num_awake += 1

    # --- in a thread ---

    def _run(self) -> None:
        while (call := self._next()) is not None:
            value = call.work()
            with self._changed:
                was_given_up = call in self._hung
                (self._hung if was_given_up else self._running).remove(call)
            # Nobody waits in a loop that is closed.
            with contextlib.suppress(RuntimeError):
                call.loop.call_soon_threadsafe(call.tell, value)
            if was_given_up:
                return
            # What it held is not held until the next one.
            del call, value

    def _next(self) -> _Call | None:
        """Waits for a call; None: there will be none."""
        with self._changed:
            while True:
                while self._waiting and not self._is_closed:
                    call = self._waiting.popleft()
                    if not call.answer.done():  # whoever waited was cancelled
                        call.began_at = time.monotonic()
                        self._running.add(call)
                        return call
                self._num_awake -= 1
                while not self._num_wakes:
                    if self._is_closed:
                        return None
                    self._changed.wait()
                self._num_wakes -= 1
