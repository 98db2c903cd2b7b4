"""Calling a reward function beside the event loop, with a deadline for each call."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from scalerl.rewards.errors import RewardError
from scalerl.rewards.reward_function import RewardFunction

NUM_THREADS = 8
MAX_CONCURRENT_ASYNC = 256
# Calls past their deadline that still run. A thread cannot be killed, so each keeps one.
MAX_HUNG = 64


@dataclass(frozen=True)
class Outcome:
    """What one call came to: a value, or the exception it raised, or a deadline that passed."""

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False


class RewardCaller:
    """Runs a sync function in NUM_THREADS daemon threads, an async one on an event loop of its own.

    So neither a slow nor a blocking function stops generation. The deadline counts from the start of the call, not from
    the wait for a free thread. A call past its deadline is left behind; with MAX_HUNG of them the next one raises
    RewardError. Limit: a call that never releases the GIL (a regular expression that backtracks for ever) stops the
    process, deadline or not.
    """

    def __init__(self, function: RewardFunction, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._hung: set[Future] = set()
        self._slots: asyncio.Semaphore | None = None
        self._slots_loop: asyncio.AbstractEventLoop | None = None
        self._async_loop: asyncio.AbstractEventLoop | None = None
        self._async_loop_lock = threading.Lock()

    async def call(self, **arguments: Any) -> Outcome:
        async with self._slots_of_running_loop():
            self._hung = {future for future in self._hung if not future.done()}
            if len(self._hung) >= MAX_HUNG:
                raise RewardError(
                    f"reward function {self._function}: {MAX_HUNG} calls are past reward_model.timeout_s="
                    f"{self._timeout_s:g} s and still run; it hangs: give it a limit of its own"
                )
            future = self._start(arguments)
            waiting = asyncio.wrap_future(future)
            try:
                done, _ = await asyncio.wait({waiting}, timeout=self._timeout_s)
            except asyncio.CancelledError:
                waiting.cancel()
                raise
            if done:
                return waiting.result()
            self._hung.add(future)
            self._stop_waiting(future, waiting)
            return Outcome(timed_out=True)

    def _slots_of_running_loop(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots_loop is not loop:
            self._slots = asyncio.Semaphore(MAX_CONCURRENT_ASYNC if self._function.is_async else NUM_THREADS)
            self._slots_loop = loop
        return self._slots
