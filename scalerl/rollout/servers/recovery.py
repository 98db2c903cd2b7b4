"""Generations that get over the loss of a server: they report it, and wait until a successor is in service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalerl.rollout.servers.client import ClientSettings, Replica

if TYPE_CHECKING:
    from scalerl.rollout.servers.client import RolloutClient
    from scalerl.rollout.servers.requests import RolloutError


@dataclass(frozen=True)
class LostServer:
    """A server that died or does not answer, as a generation noticed it.

    index: of the replica.  url: of the server that was lost; a successor has another.  why: what was noticed.
    """

    index: int
    url: str
    why: str


class Replacements:
    """Tracks which servers of a set are lost, and wakes those who wait for successors; in the generations' event loop.

    clients[i]: client of replica i; `put` replaces it.  num_resubmitted: samples that a `Dispatcher` asked again for,
    because their server was lost or cut the connection.
    """

    def __init__(self, settings: ClientSettings, replicas: Sequence[Replica]) -> None:
        self.settings = settings
        self.clients = [settings.client(replica) for replica in replicas]
        # Every client so far -> index of its replica.
        self._index_of = {client: index for index, client in enumerate(self.clients)}
        self.num_resubmitted = 0
        # Index -> a server that has no successor in service yet.
        self.missing: dict[int, LostServer] = {}
        # None ends the wait of `next_lost`.
        self._news: asyncio.Queue[LostServer | None] = asyncio.Queue()
        self._returned = asyncio.Condition()
        # Why no server comes back any more.
        self._given_up: BaseException | None = None

    async def next_lost(self) -> list[LostServer]:
        """Waits for servers that were lost since the last call, and returns them; [] after `close`."""
        lost = [await self._news.get()]
        while not self._news.empty():
            lost.append(self._news.get_nowait())
        return [server for server in lost if server is not None]

    def close(self) -> None:
        """Ends the wait of `next_lost`, with no server."""
        self._news.put_nowait(None)

    async def successor(self, lost: RolloutClient, error: RolloutError) -> RolloutClient:
        """Reports the loss, then waits until the successor is in service. Raises what ends the generation."""
        index = self._index_of[lost]
        if self.clients[index] is lost and index not in self.missing:
            self.missing[index] = LostServer(index, lost.url, str(error))
            self._news.put_nowait(self.missing[index])
        async with self._returned:
            await self._returned.wait_for(
                lambda: self._given_up or (self.clients[index] is not lost and index not in self.missing)
            )
        self._raise_if_given_up()
        return self.clients[index]

    def put(self, successors: Mapping[int, Replica]) -> None:
        """Puts restarted servers in the place of lost ones; they are not in service yet."""
        for index, replica in successors.items():
            # A generation may not have noticed the loss; it must not use the successor before it has its weights.
            self.missing.setdefault(index, LostServer(index, self.clients[index].url, "replaced"))
            self.clients[index] = self.settings.client(replica)
            self._index_of[self.clients[index]] = index

    async def in_service(self, indices: Iterable[int]) -> None:
        """Declares that these servers have their weights: generations that wait for them continue."""
        async with self._returned:
            for index in indices:
                self.missing.pop(index, None)
            self._returned.notify_all()

    async def give_up(self, error: BaseException) -> None:
        """Ends all waiting: no lost server comes back, and whoever waits for one raises this error."""
        self._given_up = error
        async with self._returned:
            self._returned.notify_all()

    def _raise_if_given_up(self) -> None:
        if self._given_up is not None:
            raise self._given_up

    async def serving(self) -> list[int]:
        """Indices of the servers that are in service; waits until there is at least one."""
        async with self._returned:
            await self._returned.wait_for(lambda: self._given_up or len(self.missing) < len(self.clients))
        self._raise_if_given_up()
        return [index for index in range(len(self.clients)) if index not in self.missing]
