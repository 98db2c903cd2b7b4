"""Calls of a reward function outside the event loop, with a deadline for each call."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from scalerl.base.process import in_daemon
from scalerl.rewards.errors import RewardError
from scalerl.rewards.reward_function import RewardFunction

NUM_THREADS = 8
MAX_CONCURRENT_ASYNC = 256
# Largest number of calls that still run past their deadline: each keeps a thread, which cannot be stopped from outside.
MAX_HUNG = 64


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call: a value, the exception that it raised, or a missed deadline."""

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False


class RewardCaller:
    """Calls a sync function in up to NUM_THREADS threads, an async one on a separate event loop.

    So neither a slow nor a blocking function stops generation. The deadline counts from the start of the call, without
    the wait for a free thread. A call past its deadline is abandoned; with MAX_HUNG of them the next one raises
    RewardError. Limit: a call that never releases the GIL (a regular expression that backtracks forever) blocks the
    process in spite of its deadline.
    """

    def __init__(self, function: RewardFunction, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        # Calls past their deadline.
        self._hung: set[Future[Outcome]] = set()
        self._slots: asyncio.Semaphore | None = None
        self._slots_loop: asyncio.AbstractEventLoop | None = None
        self._async_loop: asyncio.AbstractEventLoop | None = None
        self._async_loop_lock = threading.Lock()

    async def call(self, **arguments: Any) -> Outcome:
        """Calls the function and returns the outcome.  Raises RewardError when MAX_HUNG calls hang."""
        async with self._slots_of_running_loop():
            if self.num_hung >= MAX_HUNG:
                raise RewardError(
                    f"reward function {self._function}: {MAX_HUNG} calls are past "
                    f"reward_model.timeout_s={self._timeout_s:g} s and still run; it hangs: give it its own time limit"
                )
            future = self._start(arguments)
            waiting = asyncio.wrap_future(future)
            try:
                done, _ = await asyncio.wait({waiting}, timeout=self._timeout_s)
                if done:
                    # A call that cancels itself has failed; it must not look as if the caller were cancelled.
                    return Outcome(error=asyncio.CancelledError()) if waiting.cancelled() else waiting.result()
            finally:
                waiting.cancel()
            if not future.done():
                self._hung.add(future)
            return Outcome(timed_out=True)

    @property
    def num_hung(self) -> int:
        """The number of calls past their deadline that still run."""
        self._hung = {future for future in self._hung if not future.done()}
        return len(self._hung)

    def close(self) -> None:
        """Ends the event loop of an async function; calls that still run are abandoned."""
        with self._async_loop_lock:
            if self._async_loop is not None:
                self._async_loop.call_soon_threadsafe(self._async_loop.stop)
                self._async_loop = None

    def _slots_of_running_loop(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots_loop is not loop:
            self._slots = asyncio.Semaphore(MAX_CONCURRENT_ASYNC if self._function.is_async else NUM_THREADS)
            self._slots_loop = loop
        return self._slots

    def _start(self, arguments: dict[str, Any]) -> Future[Outcome]:
        if self._function.is_async:
            return asyncio.run_coroutine_threadsafe(self._async_outcome(arguments), self._loop())
        return in_daemon(partial(self._outcome, arguments), f"reward:{self._function.name}")

    def _outcome(self, arguments: dict[str, Any]) -> Outcome:
        """Calls the function in this thread, for an async function that does not look like one too."""
        try:
            value = self._function(**arguments)
            if inspect.isawaitable(value):
                value = asyncio.run_coroutine_threadsafe(_awaited(value), self._loop()).result()
            return Outcome(value)
        except BaseException as error:  # SystemExit too: it is a failed call, not the end of the process
            return Outcome(error=error)

    async def _async_outcome(self, arguments: dict[str, Any]) -> Outcome:
        try:
            return Outcome(await self._function(**arguments))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit would end the loop's thread
            return Outcome(error=error)

    def _loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of all async calls; clients that a reward function keeps between calls are bound to it."""
        with self._async_loop_lock:
            if self._async_loop is None:
                self._async_loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._async_loop,), name="reward-loop", daemon=True).start()
            return self._async_loop


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop until it is stopped, and gives its sockets back: no moment of the garbage collector's decides."""
    try:
        loop.run_forever()
    finally:
        loop.close()
