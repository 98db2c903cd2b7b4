"""How a run is asked to end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from scalerl.trainer.stop import EXIT_REQUEUE, StopRequest

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As they were."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_sigusr1_lets_the_step_end() -> None:
    stop = StopRequest()
    stop.listen()
    assert not stop.requested
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.requested


def test_sigterm_leaves_by_an_exception() -> None:
    """So that `with` blocks end servers and workers."""
    stop = StopRequest()
    stop.listen()
    closed = []
    with pytest.raises(SystemExit) as error:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            closed.append(True)
    assert error.value.code == 143 and closed and not stop.requested


def test_nothing_is_installed_off_the_main_thread() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    thread = threading.Thread(target=StopRequest().listen)
    thread.start()
    thread.join()
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_request_is_quiet_until_it_listens() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    assert StopRequest().requested is False
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_the_launcher_knows_the_code() -> None:
    """sysexits.h EX_TEMPFAIL, which the Slurm launcher puts back in the queue."""
    assert EXIT_REQUEUE == os.EX_TEMPFAIL
