"""News of lost servers reach the driver once; generations wait until the successor is in service."""

from __future__ import annotations

import asyncio

import pytest

from scalerl.controller.replacements import LostServer, Replacements, Resubmissions
from scalerl.rollout.client import GenerateRequest, RolloutClient, RolloutError, SamplingParams


def client(name: str) -> RolloutClient:
    return RolloutClient(f"http://{name}", "embedded", key="key", max_model_len=8)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_loss_is_told_once_and_waited_for_by_all() -> None:
    async def run() -> None:
        old, other, new = client("old"), client("other"), client("new")
        places = Replacements([old, other])
        waiting = [asyncio.create_task(places.successor(0, old, RolloutError(f"error {i}"))) for i in range(2)]
        assert await places.next_lost() == [LostServer(0, "http://old", "error 0")]
        assert list(places.missing) == [0]
        places.put(0, new)
        # It has no weights yet, and another generation that finds the old one gone waits too.
        waiting.append(asyncio.create_task(places.successor(0, old, RolloutError("late"))))
        await settle()
        assert not any(task.done() for task in waiting)
        await places.in_service([0])
        assert await asyncio.gather(*waiting) == [new] * 3
        assert places.missing == {} and places.clients == [new, other]
        news = asyncio.create_task(places.next_lost())
        # Who comes when all is over gets the successor at once.
        assert await places.successor(0, old, RolloutError("too late")) is new
        await settle()
        assert not news.done()
        waiting = [asyncio.create_task(places.successor(0, new, RolloutError("again")))]
        assert await news == [LostServer(0, "http://new", "again")]
        waiting[0].cancel()

    asyncio.run(run())


def test_a_successor_that_is_lost_before_it_serves_is_replaced_before_anyone_goes_on() -> None:
    async def run() -> None:
        old, first, second = client("old"), client("first"), client("second")
        places = Replacements([old])
        waiting = asyncio.create_task(places.successor(0, old, RolloutError("error")))
        await places.next_lost()
        places.put(0, first)
        # The driver saw it die while it sent the weights.
        places.put(0, second)
        await places.in_service([0])
        assert await waiting is second

    asyncio.run(run())


@pytest.mark.parametrize("num_samples", [1, 4])
def test_resubmitted_samples_are_counted(num_samples: int) -> None:
    again = Resubmissions(Replacements([]))
    again.resubmitted(GenerateRequest(0, [1], num_samples, SamplingParams(1)))
    again.resubmitted(GenerateRequest(1, [1], 2, SamplingParams(1)))
    assert again.num_samples == num_samples + 2
