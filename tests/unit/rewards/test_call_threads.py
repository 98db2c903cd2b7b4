"""Sync calls outside of the event loop: which thread takes them, and what becomes of those that last."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from scalerl.rewards import call_threads
from scalerl.rewards.call_threads import CallThreads, TooManyHungError

LONG_S = 60.0


@pytest.fixture(
    autouse=True, params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"]
)
def loop_policy(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rollout workers have Ray's event loop, which is uvloop's."""
    asyncio.set_event_loop_policy(request.param())
    yield
    asyncio.set_event_loop_policy(None)


@pytest.fixture
def threads() -> Iterator[CallThreads]:
    made = CallThreads("test", num_threads=3, max_hung=2)
    yield made
    made.close()


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets calls that hang go when the test ends."""
    event = threading.Event()
    yield event
    event.set()


async def all_of(threads: CallThreads, works: list[Callable[[], Any]], timeout_s: float = LONG_S) -> list[Any]:
    return await asyncio.gather(*(threads.call(work, timeout_s) for work in works), return_exceptions=True)


def test_calls_that_nobody_waits_long_for_have_one_thread(
    threads: CallThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_threads, "HELP_S", LONG_S)

    assert len(set(asyncio.run(all_of(threads, [threading.get_ident] * 300)))) == 1


def test_one_thread_takes_calls_in_the_order_in_which_they_came() -> None:
    made, taken = CallThreads("test", num_threads=1, max_hung=2), list[int]()
    works = [lambda number=number: taken.append(number) or True for number in range(50)]
    assert asyncio.run(all_of(made, works)) == [True] * 50
    assert taken == list(range(50))
    made.close()


def test_calls_that_wait_for_each_other_get_a_thread_each(threads: CallThreads) -> None:
    barrier = threading.Barrier(3)

    def meet() -> int:
        barrier.wait(LONG_S)
        return threading.get_ident()

    assert len(set(asyncio.run(all_of(threads, [meet] * 3)))) == 3


def test_a_call_behind_one_that_lasts_gets_another_thread(threads: CallThreads, release: threading.Event) -> None:
    async def main() -> Any:
        lasting = asyncio.ensure_future(threads.call(lambda: release.wait(LONG_S), LONG_S))
        value = await threads.call(lambda: "short", LONG_S)
        assert not lasting.done()
        release.set()
        return value, await lasting

    assert asyncio.run(main()) == ("short", True)


def test_there_are_never_more_threads_than_given(threads: CallThreads) -> None:
    lock, num_running, most = threading.Lock(), 0, 0

    def work() -> bool:
        nonlocal num_running, most
        with lock:
            num_running += 1
            most = max(most, num_running)
        threading.Event().wait(0.01)
        with lock:
            num_running -= 1
        return True

    assert asyncio.run(all_of(threads, [work] * 40)) == [True] * 40
    assert 2 <= most <= 3


def test_past_the_deadline_none_comes_and_its_thread_is_replaced(release: threading.Event) -> None:
    """As many hang as there are threads, and a later call is made all the same."""
    made = CallThreads("test", num_threads=1, max_hung=2)

    async def main() -> list[Any]:
        late = await made.call(lambda: release.wait(LONG_S), 0.05)
        return [late, made.num_hung, await made.call(lambda: "later", LONG_S)]

    assert asyncio.run(main()) == [None, 1, "later"]
    made.close()


def test_too_many_that_hang_refuse_new_calls_and_those_that_wait(release: threading.Event) -> None:
    made = CallThreads("test", num_threads=1, max_hung=2)

    async def main() -> None:
        outcomes = await all_of(made, [lambda: release.wait(LONG_S)] * 4, 0.05)
        assert outcomes[:2] == [None, None]
        assert [type(outcome) for outcome in outcomes[2:]] == [TooManyHungError] * 2
        with pytest.raises(TooManyHungError):
            await made.call(lambda: True, LONG_S)
        release.set()
        while made.num_hung:
            await asyncio.sleep(0.001)
        assert await made.call(lambda: "again", LONG_S) == "again"

    asyncio.run(main())
    made.close()


def test_a_call_that_nobody_waits_for_any_more_is_not_made(threads: CallThreads, release: threading.Event) -> None:
    made: list[str] = []

    async def main() -> None:
        lasting = [asyncio.ensure_future(threads.call(lambda: release.wait(LONG_S), LONG_S)) for _ in range(3)]
        waiting = asyncio.ensure_future(threads.call(lambda: made.append("cancelled") or True, LONG_S))
        await asyncio.sleep(0.1)
        waiting.cancel()
        release.set()
        await asyncio.gather(*lasting)
        assert await threads.call(lambda: made.append("later") or True, LONG_S)

    asyncio.run(main())
    assert made == ["later"]


def test_a_look_that_is_due_already(threads: CallThreads, release: threading.Event) -> None:
    """The loop is held up until a call that waits, and one that is late, should have been looked at."""

    async def main() -> list[Any]:
        lasting = asyncio.ensure_future(threads.call(lambda: release.wait(LONG_S), 0.01))
        for _ in range(3):
            await asyncio.sleep(0)
            time.sleep(0.02)
        return [await threads.call(lambda: "other", LONG_S), await lasting]

    assert asyncio.run(main()) == ["other", None]


def test_closing_ends_the_threads() -> None:
    before = set(threading.enumerate())
    made = CallThreads("test", num_threads=3, max_hung=1)
    barrier = threading.Barrier(3)
    asyncio.run(all_of(made, [lambda: barrier.wait(LONG_S) + 1] * 3))
    own = set(threading.enumerate()) - before
    assert len(own) == 3
    made.close()
    for thread in own:
        thread.join(LONG_S)
    assert not any(thread.is_alive() for thread in own)
