"""Calls in processes that can be killed, for functions that hang, hold the GIL, use signals or take much memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

START_TIMEOUT_S = 120.0
DEFAULT_MEMORY_BYTES = 4 * 1024**3


class CallFailed(Exception):
    """Raised when a call raised, or its process ended; the message says which."""


class CallTimeout(CallFailed):
    """Raised when a call missed its deadline; its process has been killed."""


class ProcessPool:
    """Calls one function in up to num_processes processes, which are kept between calls; thread-safe.

    target: `module:name`, or `file.py:name`. memory_bytes: address space of one process. user_files: imported first.

    `concurrent.futures.ProcessPoolExecutor` does not do: a process of it that is killed breaks the whole pool, with all
    calls in it.
    """

    def __init__(
        self,
        target: str,
        num_processes: int,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        user_files: Sequence[str] = (),
    ) -> None:
        self._arguments = (target, str(memory_bytes), *user_files)
        self._free: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(num_processes):
            self._free.put(None)
        self._lock = threading.Lock()
        self._processes: set[_Process] = set()
        self._closed = False

    def call(self, timeout_s: float, arguments: dict[str, Any]) -> Any:
        """Calls the function and returns its value; the deadline counts from the start of the call.

        The wait for a free process does not count. Raises CallTimeout (the process is killed, the next call gets a new
        one), or CallFailed with type, message and place of what the function raised, or why the process ended.
        """
        process, kept = self._free.get(), None
        try:
            if process is None or not process.is_alive():
                process = self._start()
            process.send((timeout_s, arguments))
            kind, value = process.receive(timeout_s, "the call")
            kept = process
        finally:
            # Nobody would read the answer of a process that has not given it.
            if kept is None and process is not None:
                self._discard(process)
            self._free.put(kept)
        if kind == "error":
            raise CallFailed(value)
        return value

    def close(self) -> None:
        """Kills the processes, so that running calls fail."""
        with self._lock:
            self._closed = True
            processes, self._processes = self._processes, set()
        for process in processes:
            process.kill()

    def _start(self) -> _Process:
        process = _Process(self._arguments)
        with self._lock:
            closed = self._closed
            if not closed:
                self._processes.add(process)
        try:
            if closed:
                raise CallFailed("the pool is closed")
            kind, value = process.receive(START_TIMEOUT_S, "the start of its process")
            if kind == "error":
                raise CallFailed(value)
        except BaseException:
            self._discard(process)
            raise
        return process

    def _discard(self, process: _Process) -> None:
        with self._lock:
            self._processes.discard(process)
        process.kill()


class _Process:
    """A process that runs `process_worker`, in a process group with whatever the function starts."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._target = arguments[0]
        self._connection, theirs = multiprocessing.Pipe()
        # One thread, because thread pools of numeric libraries count against the address space.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scalerl.rewards.process_worker", str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=env,
            )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, call: tuple[float, dict[str, Any]]) -> None:
        try:
            self._connection.send(call)
        except OSError:
            raise self._ended() from None

    def receive(self, timeout_s: float, what: str) -> tuple[str, Any]:
        """Returns (kind, value) as the process sent it.  Raises CallTimeout, or CallFailed if the process ended."""
        try:
            if not self._connection.poll(timeout_s):
                raise CallTimeout(f"{what} took more than {timeout_s:g} s")
            return self._connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None

    def _ended(self) -> CallFailed:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        if code == -signal.SIGALRM:
            return CallTimeout("the call took longer than its time")
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return CallFailed(f"the process of {self._target} ended with {how}; its stderr is in the log of this process")

    def kill(self) -> None:
        # Kills the whole group, with what the function started. It is reaped afterwards, so the id is still valid here.
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
