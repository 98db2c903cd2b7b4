"""Calls in processes that can be killed, for functions that hang, hold the GIL, use signals or take much memory."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import time
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
    """

    def __init__(
        self,
        target: str,
        num_processes: int,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        user_files: Sequence[str] = (),
    ) -> None:
        self._target, self._memory_bytes, self._user_files = target, memory_bytes, tuple(user_files)
        self._free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_processes):
            self._free.put(None)
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._closed = False

    def call(self, timeout_s: float, arguments: dict[str, Any]) -> Any:
        """Calls the function and returns its value; the deadline counts from the start of the call.

        The wait for a free process does not count. Raises CallTimeout (the process is killed, the next call gets a new
        one), or CallFailed with type, message and place of what the function raised, or why the process ended.
        """
        worker = self._free.get()
        try:
            if worker is None or not worker.is_alive():
                worker = self._start()
            return worker.call(timeout_s, arguments)
        except _WorkerLost as lost:
            if worker is not None:
                self._discard(worker)
            worker = None
            raise lost.failure from None
        except BaseException as error:
            if worker is not None and not isinstance(error, CallFailed):
                self._discard(worker)  # nobody would read its answer
                worker = None
            raise
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """Kills the processes, so that running calls fail."""
        with self._lock:
            self._closed = True
            workers, self._workers = self._workers, set()
        for worker in workers:
            worker.kill()

    def _start(self) -> _Worker:
        worker = _Worker(self._target, self._memory_bytes, self._user_files)
        with self._lock:
            closed = self._closed
            if not closed:
                self._workers.add(worker)
        if closed:
            worker.kill()
            raise CallFailed("the pool is closed")
        try:
            worker.wait_ready()
        except _WorkerLost as lost:
            if worker is not None:
                self._discard(worker)
            raise lost.failure from None
        return worker

    def _discard(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.kill()


class _WorkerLost(Exception):
    def __init__(self, failure: CallFailed) -> None:
        super().__init__(str(failure))
        self.failure = failure


class _Worker:
    def __init__(self, target: str, memory_bytes: int, user_files: tuple[str, ...]) -> None:
        self._target = target
        # One thread, because thread pools of numeric libraries count against the address space.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "scalerl.rewards.process_worker", target, str(memory_bytes), *user_files],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=env,
            bufsize=0,
        )
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        self._read(START_TIMEOUT_S, "the start of its process")

    def call(self, timeout_s: float, arguments: dict[str, Any]) -> Any:
        message = pickle.dumps((timeout_s, arguments))
        try:
            view = memoryview(len(message).to_bytes(8, "little") + message)
            while view:
                view = view[self._stdin.write(view) :]
        except OSError:
            raise _WorkerLost(self._ended()) from None
        return self._read(timeout_s, "the call")

    def _read(self, timeout_s: float, what: str) -> Any:
        deadline = time.monotonic() + timeout_s
        header = self._read_bytes(8, deadline, timeout_s, what)
        kind, value = pickle.loads(self._read_bytes(int.from_bytes(header, "little"), deadline, timeout_s, what))
        if kind == "error":
            raise CallFailed(value)
        if kind == "broken":
            raise _WorkerLost(CallFailed(value))
        return value

    def _read_bytes(self, count: int, deadline: float, timeout_s: float, what: str) -> bytes:
        parts, fd = [], self._stdout.fileno()
        poll = select.poll()  # select() refuses descriptors above 1023
        poll.register(fd, select.POLLIN)
        while count:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise _WorkerLost(CallTimeout(f"{what} took more than {timeout_s:g} s"))
            part = os.read(fd, min(count, 1 << 20))
            if not part:
                raise _WorkerLost(self._ended())
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

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
        self._stdin.close()
        self._stdout.close()
