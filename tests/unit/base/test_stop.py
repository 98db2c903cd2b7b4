"""How a run is asked to end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from scalerl.base.stop import EXIT_REQUEUE, EXIT_TERMINATED, TERMINATED, StopRequest

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As they were."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_sigusr1_lets_the_step_end() -> None:
    stop = StopRequest()
    with stop.listening():
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested and not stop.terminated


def test_sigterm_leaves_by_an_exception(capsys: pytest.CaptureFixture[str]) -> None:
    """So that `with` blocks end servers and workers; how to continue is said when they have."""
    stop = StopRequest()
    closed, went_on = [], []
    with pytest.raises(SystemExit) as error, stop.listening("The same command continues."):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            went_on.append(True)
        finally:
            closed.append(True)
            assert capsys.readouterr().err == ""
    assert error.value.code == EXIT_TERMINATED == 143 and closed and not went_on
    assert capsys.readouterr().err == f"{TERMINATED} The same command continues.\n"


def test_a_second_sigterm_does_not_cut_short_the_end() -> None:
    stop = StopRequest()
    closed = []
    with pytest.raises(SystemExit), stop.listening():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            closed.append(True)
    assert closed


BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])


@BOTH
def test_with_a_deadline_it_lets_the_step_end(number: signal.Signals) -> None:
    """However often it comes; the deadline goes with the block."""
    stop = StopRequest(save_deadline_s=60)
    with stop.listening():
        os.kill(os.getpid(), number)
        left_s, _ = signal.getitimer(signal.ITIMER_REAL)
        os.kill(os.getpid(), number)
        assert stop.requested and not stop.terminated
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= left_s <= 30
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_notice_leaves_what_the_job_has_left_and_a_sigterm_after_it_less() -> None:
    """A scheduler's notice comes minutes before the end, its SIGTERM seconds before."""
    stop = StopRequest(60, job_left_s=lambda: 600)
    with stop.listening():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert 60 < signal.getitimer(signal.ITIMER_REAL)[0] <= 300
        os.kill(os.getpid(), signal.SIGTERM)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 30
        os.kill(os.getpid(), signal.SIGUSR1)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 30


@pytest.mark.parametrize("left_s", [None, 2, -5])
def test_a_notice_leaves_the_deadline_at_least(left_s: float | None) -> None:
    stop = StopRequest(60, job_left_s=lambda: left_s)
    with stop.listening():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert 3 < signal.getitimer(signal.ITIMER_REAL)[0] <= 30


def test_a_notice_without_a_deadline_waits_for_the_step() -> None:
    with StopRequest(job_left_s=lambda: 600).listening():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@BOTH
def test_what_takes_longer_than_the_deadline_is_interrupted(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = StopRequest(save_deadline_s=0.05)
    went_on = []
    with pytest.raises(SystemExit) as error, stop.listening():
        os.kill(os.getpid(), number)
        assert stop.requested and not stop.terminated
        time.sleep(30)
        went_on.append(True)
    assert error.value.code == EXIT_TERMINATED and not went_on
    assert capsys.readouterr().err == f"{TERMINATED}\n"


@BOTH
def test_halfway_to_the_deadline_a_step_may_be_given_up(number: signal.Signals) -> None:
    """Once, and only if that lets something be saved: the other half is for the save."""
    stop, given_up = StopRequest(save_deadline_s=2.0), []
    with pytest.raises(SystemExit) as error, stop.listening():
        os.kill(os.getpid(), number)
        given_up.append(stop.in_time(lambda: time.sleep(30) or "done"))
        assert stop.cut and not stop.terminated
        # The save takes too long.
        time.sleep(30)
    assert error.value.code == EXIT_TERMINATED and given_up == [None]


@BOTH
def test_a_save_in_the_second_half_ends_the_run_as_it_was_asked_to(number: signal.Signals) -> None:
    stop = StopRequest(save_deadline_s=2.0)
    with stop.listening():
        os.kill(os.getpid(), number)
        assert stop.in_time(lambda: time.sleep(30) or "done") is None
    assert stop.requested and stop.cut and not stop.terminated
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_what_may_not_be_given_up_ends_and_nothing_is_begun_in_the_second_half() -> None:
    """As an update, and the validation after it."""
    stop, begun = StopRequest(save_deadline_s=60), []

    def update() -> str:
        # As when half of the time is over.
        os.kill(os.getpid(), signal.SIGALRM)
        return "done"

    with stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.in_time(update, may_cut=lambda: False) == "done"
        assert stop.is_late and not stop.cut
        assert stop.in_time(lambda: begun.append("validation") or "done") is None
        assert stop.cut and begun == []
        # What is worth more than that is begun.
        assert stop.in_time(lambda: "done", may_cut=lambda: False) == "done"


def test_another_interrupt_is_not_taken_for_the_deadline() -> None:
    stop = StopRequest(save_deadline_s=60)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with stop.listening(), pytest.raises(KeyboardInterrupt):
        stop.in_time(interrupted)
    assert stop.in_time(lambda: "done") == "done" and not stop.is_late


def test_a_start_of_ray_that_sigterm_cuts_short_has_nothing_to_save() -> None:
    """As `sigterm_kept` passes it on: the handler is called, then Ray's own exit goes on."""
    stop = StopRequest(save_deadline_s=60)
    with pytest.raises(SystemExit) as error, stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        sys.exit(signal.SIGTERM)
    assert error.value.code == EXIT_TERMINATED


def test_what_the_interrupt_breaks_is_no_error_of_its_own() -> None:
    with pytest.raises(SystemExit) as error, StopRequest().listening():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise RuntimeError("a call that was cut short") from None
    assert error.value.code == EXIT_TERMINATED


def test_an_exception_that_is_lost_still_ends_the_run() -> None:
    """As in a destructor, whose exceptions Python drops: the loop sees the request, and the code is the signal's."""
    stop = StopRequest()
    with pytest.raises(SystemExit) as error, stop.listening():
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert error.value.code == EXIT_TERMINATED


def test_ctrl_c_and_errors_pass() -> None:
    for kind in (KeyboardInterrupt, ValueError):
        with pytest.raises(kind), StopRequest().listening():
            raise kind


def test_the_alarm_of_rays_handler_is_off() -> None:
    """Ray's handler below Python's calls ours and aborts the process 3 seconds later, however far its end is."""
    stop = StopRequest()
    signal.alarm(60)
    with pytest.raises(SystemExit), stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.alarm(0) == 0


def test_the_handlers_are_those_of_before_again() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest().listening():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_nothing_is_installed_off_the_main_thread() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    inside = []

    def listen() -> None:
        with StopRequest().listening():
            inside.extend(signal.getsignal(number) for number in SIGNALS)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert inside == before


def test_the_codes() -> None:
    """sysexits.h EX_TEMPFAIL, which the Slurm launcher puts back in the queue; what a shell says of SIGTERM."""
    assert EXIT_REQUEUE == os.EX_TEMPFAIL
    killed = subprocess.run([sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 15)"])
    assert 128 - killed.returncode == EXIT_TERMINATED
