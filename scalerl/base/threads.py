"""Calls in daemon threads, for which the end of the process does not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_daemon(call: Callable[[], T], name: str) -> Future[T]:
    """Runs a call in a daemon thread; the future holds its result or exception.

    A caller that is interrupted while it waits for the future can leave, and the call ends with the process. The
    threads of an executor would keep the process alive.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    done.set_running_or_notify_cancel()
    threading.Thread(target=run, name=name, daemon=True).start()
    return done
