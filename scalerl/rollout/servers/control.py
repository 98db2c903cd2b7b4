"""`ServerControl`: pause, continue, release, resume, health and caches of all servers of a set at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from scalerl.base.process import in_daemon
from scalerl.rollout.servers.client import RolloutClient
from scalerl.rollout.servers.engines.protocol import CacheSize
from scalerl.rollout.servers.replica import ClientSettings, Replica
from scalerl.rollout.servers.requests import RolloutError

T = TypeVar("T")


class ServerControl:
    """Pauses, continues, releases and resumes all servers of a set, side by side, whoever sends them prompts.

    It remembers what it paused and released; the successor of a lost server (`put`) is neither.
    """

    def __init__(self, settings: ClientSettings, replicas: Sequence[Replica]) -> None:
        self.settings = settings
        self.clients = [settings.client(replica) for replica in replicas]

    def put(self, index: int, successor: Replica) -> None:
        """Puts a restarted server in the place of a lost server."""
        self.clients[index] = self.settings.client(successor)

    def pause(self) -> dict[int, str]:
        """Interrupts running samples where they are; they wait. Returns index -> error, of servers that failed."""
        return self._ask_each(RolloutClient.pause, range(len(self.clients)))

    def continue_generation(self) -> dict[int, str]:
        """Continues what `pause` interrupted, under the weights that its server has now. Returns as `pause`."""
        paused = [index for index, client in enumerate(self.clients) if client.paused]
        return self._ask_each(RolloutClient.continue_generation, paused)

    def release(self, part: str, skip: Collection[int] = ()) -> dict[int, str]:
        """Frees that part (kv_cache, weights) of the servers' device memory. Returns as `pause`.

        skip: indices of servers that are not asked.
        """
        asked = [index for index in range(len(self.clients)) if index not in skip]
        return self._ask_each(lambda client: client.release(client.engine.memory_tags[part]), asked)

    def resume(self, part: str) -> dict[int, str]:
        """Has servers that released that part take it back. Returns as `pause`."""
        released = [
            index
            for index, client in enumerate(self.clients)
            if client.released.issuperset(client.engine.memory_tags[part])
        ]
        return self._ask_each(lambda client: client.resume(client.engine.memory_tags[part]), released)

    def are_well(self, indices: Iterable[int]) -> Mapping[int, bool]:
        """Whether each of these servers does its work (`RolloutClient.is_well`), by index."""

        async def ask() -> dict[int, bool]:
            asked = list(indices)
            return dict(zip(asked, await asyncio.gather(*(self.clients[i].is_well() for i in asked)), strict=True))

        return asyncio.run(ask())

    def cache_sizes(self, indices: Iterable[int]) -> dict[int, CacheSize | None]:
        """The sizes of these servers' KV caches (`RolloutClient.cache_size`), by index.  Raises RolloutError."""
        answers = self._side_by_side(RolloutClient.cache_size, indices)
        return {index: answer.result() for index, answer in answers.items()}

    def _side_by_side(self, call: Callable[[RolloutClient], T], indices: Iterable[int]) -> dict[int, Future[T]]:
        return {index: in_daemon(partial(call, self.clients[index]), f"server {index}") for index in indices}

    def _ask_each(self, call: Callable[[RolloutClient], None], indices: Sequence[int]) -> dict[int, str]:
        failed = {}
        for index, answer in self._side_by_side(call, indices).items():
            error = answer.exception()
            if isinstance(error, RolloutError):
                failed[index] = str(error)
            elif error is not None:
                raise error
        return failed
