"""News of lost servers reach the driver once; generations wait until the successor is in service."""

from __future__ import annotations

import asyncio

import pytest

from scalerl.rollout.servers.client import ClientSettings, Replica
from scalerl.rollout.servers.purpose import JUDGE
from scalerl.rollout.servers.recovery import LostServer, Replacements
from scalerl.rollout.servers.requests import RolloutError


def replica(name: str) -> Replica:
    return Replica(f"http://{name}", "embedded", 1, "key")


def replacements(*names: str) -> Replacements:
    return Replacements(
        ClientSettings(JUDGE, max_model_len=8, timeout_s=2.0, max_concurrency=1), [replica(name) for name in names]
    )


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_loss_is_told_once_and_waited_for_by_all() -> None:
    async def run() -> None:
        places = replacements("old", "other")
        old, other = places.clients
        waiting = [asyncio.create_task(places.successor(old, RolloutError(f"error {i}"))) for i in range(2)]
        assert await places.next_lost() == [LostServer(0, "http://old", "error 0")]
        assert list(places.missing) == [0]
        places.put({0: replica("new")})
        new = places.clients[0]
        assert (new.url, new.max_model_len, new.timeout_s) == ("http://new", 8, 2.0)
        # It has no weights yet, and another generation that finds the old one gone waits too.
        waiting.append(asyncio.create_task(places.successor(old, RolloutError("late"))))
        await settle()
        assert not any(task.done() for task in waiting)
        await places.in_service([0])
        assert await asyncio.gather(*waiting) == [new] * 3
        assert places.missing == {} and places.clients == [new, other]
        news = asyncio.create_task(places.next_lost())
        # Who comes when all is over gets the successor at once.
        assert await places.successor(old, RolloutError("too late")) is new
        await settle()
        assert not news.done()
        waiting = [asyncio.create_task(places.successor(new, RolloutError("again")))]
        assert await news == [LostServer(0, "http://new", "again")]
        waiting[0].cancel()

    asyncio.run(run())


def test_a_successor_that_is_lost_before_it_serves_is_replaced_before_anyone_goes_on() -> None:
    async def run() -> None:
        places = replacements("old")
        (old,) = places.clients
        waiting = asyncio.create_task(places.successor(old, RolloutError("error")))
        await places.next_lost()
        places.put({0: replica("first")})
        # The driver saw it die while it sent the weights.
        places.put({0: replica("second")})
        await places.in_service([0])
        assert (await waiting).url == "http://second"

    asyncio.run(run())


def test_a_generation_on_some_of_the_servers_waits_for_those() -> None:
    async def run() -> None:
        places = replacements("a", "b", "c")
        assert await places.serving() == [0, 1, 2]
        waiting = asyncio.create_task(places.successor(places.clients[2], RolloutError("error")))
        assert [server.index for server in await places.next_lost()] == [2]
        assert await places.serving() == [0, 1]
        places.put({2: replica("d")})
        await places.in_service([2])
        assert (await waiting).url == "http://d" and await places.serving() == [0, 1, 2]

    asyncio.run(run())


def test_whoever_waits_learns_that_no_server_comes_back() -> None:
    async def run() -> None:
        places = replacements("a")
        waiting = asyncio.create_task(places.successor(places.clients[0], RolloutError("error")))
        await places.next_lost()
        nobody = asyncio.create_task(places.serving())
        await settle()
        assert not waiting.done() and not nobody.done()
        await places.give_up(RolloutError("no restart left"))
        for task in (waiting, nobody):
            with pytest.raises(RolloutError, match="no restart left"):
                await task

    asyncio.run(run())
