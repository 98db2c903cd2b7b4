"""A thread and a bounded queue per backend, so that a failing, slow or hanging one loses records but delays no step."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

from scalerl.tracking.backend import Backend, TrackingStartError, first_line

logger = logging.getLogger(__name__)

QUEUE_SIZE = 1000
# More than MLflow's first start on a slow file system takes (it creates its tables), and its client's retries.
START_TIMEOUT_S = 300.0

Write = Callable[[Backend], None]


class Channel:
    """A daemon thread that opens a backend and then makes all calls to it.

    open_backend: raises when the backend cannot be used; `wait_started` raises that error.
    """

    def __init__(
        self,
        name: str,
        open_backend: Callable[[], Backend],
        *,
        queue_size: int = QUEUE_SIZE,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.name = name
        self._open_backend = open_backend
        self._start_timeout_s = start_timeout_s
        self._queue: queue.Queue[Write | None] = queue.Queue(queue_size)
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._backend: Backend | None = None
        self._lock = threading.Lock()
        self._num_writes = 0
        self._num_lost = 0
        self._is_busy = False
        self._status: str | None = None
        # Set when all that was queued before it is written.
        self._flushed: threading.Event | None = None
        self._thread = threading.Thread(target=self._run, name=f"tracking-{name}", daemon=True)
        self._thread.start()

    def wait_started(self) -> Backend:
        """Waits until the backend is open, and returns it.

        Raises what opening it raised, or TrackingStartError when that takes longer than start_timeout_s.
        """
        if not self._started.wait(self._start_timeout_s):
            raise TrackingStartError(
                f"trainer.logger has {self.name}, which did not start within {self._start_timeout_s:.0f} s: "
                f"see whether what it connects to answers, or take {self.name} out of trainer.logger"
            )
        if self._start_error is not None:
            raise self._start_error
        assert self._backend is not None
        return self._backend

    def put(self, write: Write) -> None:
        """Queues a write for the thread; never waits."""
        if self._status is not None:
            return
        with self._lock:
            self._num_writes += 1
        try:
            self._queue.put_nowait(write)
        except queue.Full:
            self._lose(f"{self._queue.maxsize} writes wait already: it is too slow, or hangs")

    def flush(self, deadline: float) -> None:
        """Waits until the backend has all that was queued, at most until a deadline of time.monotonic().

        A backend that was too slow for the flush before is not waited for until it has caught up.
        """
        if self._status is not None or (self._flushed is not None and not self._flushed.is_set()):
            return
        flushed = self._flushed = threading.Event()
        try:
            self._queue.put_nowait(lambda backend: flushed.set())
        except queue.Full:
            return
        flushed.wait(max(0.0, deadline - time.monotonic()))

    def close(self, status: str) -> None:
        """Ends the channel: queued records are written, then the backend is closed. Does not wait; `join` does."""
        self._status = status
        # Wakes the thread if it waits; if it works it will see the status by itself.
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def join(self, deadline: float) -> None:
        """Waits for the end of the channel until a deadline of time.monotonic().

        A thread that is not done by then is abandoned; it ends with the process.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._start_error is not None:
            return
        if self._thread.is_alive():
            logger.warning(
                "tracking backend %r did not end in time and is left behind, %d writes and its end are lost",
                self.name,
                self._queue.qsize() + self._is_busy,
            )
        with self._lock:
            if self._num_lost:
                logger.warning(
                    "tracking backend %r: %d of %d writes failed or were dropped in this run",
                    self.name,
                    self._num_lost,
                    self._num_writes,
                )

    def _run(self) -> None:
        try:
            self._backend = self._open_backend()
        # BaseException, here and below, so that a client library that calls sys.exit ends nothing.
        except BaseException as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        while not (self._status is not None and self._queue.empty()):
            if (write := self._queue.get()) is not None:
                self._attempt(write)
        status = self._status
        with self._lock:
            self._num_writes += 1
        self._attempt(lambda backend: backend.finish(status))

    def _attempt(self, write: Write) -> None:
        assert self._backend is not None
        self._is_busy = True
        try:
            write(self._backend)
        except BaseException as error:
            self._lose(first_line(error))
        finally:
            self._is_busy = False

    def _lose(self, cause: str) -> None:
        with self._lock:
            self._num_lost += 1
            if self._num_lost > 1:
                return
        logger.warning(
            "tracking backend %r: a write failed, training continues, later failures are counted and reported at the "
            "end: %s",
            self.name,
            cause,
        )
