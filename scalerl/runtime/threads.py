"""A call in a thread that nothing waits for at the end of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_daemon(call: Callable[[], T], name: str) -> Future[T]:
    """What the call gives or raises. Whoever is interrupted while they wait for it goes, and the call ends with the
    process: the threads of an executor would hold it."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    done.set_running_or_notify_cancel()
    threading.Thread(target=run, name=name, daemon=True).start()
    return done
