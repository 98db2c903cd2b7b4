"""`Replacements`: where generations wait for the successors of lost servers, and the driver for the news of a loss."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalerl.rollout.client import RolloutClient
    from scalerl.rollout.requests import GenerateRequest, RolloutError


@dataclass(frozen=True)
class LostServer:
    """index: of the replica.  url: of the server that was lost; a successor has another.  why: what was noticed."""

    index: int
    url: str
    why: str


class Replacements:
    """clients: one per replica; `put` replaces one."""

    def __init__(self, clients: list[RolloutClient]) -> None:
        self.clients = clients
        # Index -> a server that has no successor in service yet.
        self.missing: dict[int, LostServer] = {}
        # None: nobody is to wait any more.
        self._news: asyncio.Queue[LostServer | None] = asyncio.Queue()
        self._returned = asyncio.Condition()

    async def next_lost(self) -> list[LostServer]:
        """Those that were lost since the last call; waits until there is one. [] after `close`."""
        found = [await self._news.get()]
        while not self._news.empty():
            found.append(self._news.get_nowait())
        return [lost for lost in found if lost is not None]

    def close(self) -> None:
        """Whoever waits for news gets none."""
        self._news.put_nowait(None)

    async def successor(self, index: int, lost: RolloutClient, error: RolloutError) -> RolloutClient:
        """Reports the loss, then waits until the successor is in service."""
        if self.clients[index] is lost and index not in self.missing:
            self.missing[index] = LostServer(index, lost.url, str(error))
            self._news.put_nowait(self.missing[index])
        async with self._returned:
            await self._returned.wait_for(lambda: self.clients[index] is not lost and index not in self.missing)
        return self.clients[index]

    def put(self, index: int, client: RolloutClient) -> None:
        """The successor, which is not in service yet."""
        # A generation may not have noticed the loss; it must not use the successor before it has its weights.
        self.missing.setdefault(index, LostServer(index, self.clients[index].url, "replaced"))
        self.clients[index] = client

    async def in_service(self, indices: list[int]) -> None:
        """They serve the weights of the trainer."""
        async with self._returned:
            for index in indices:
                self.missing.pop(index, None)
            self._returned.notify_all()


class Resubmissions:
    """`rollout.generation.Recovery` of one generation, with its count of samples that were asked again."""

    def __init__(self, replacements: Replacements) -> None:
        self.replacements = replacements
        self.num_samples = 0

    def resubmitted(self, request: GenerateRequest) -> None:
        self.num_samples += request.n

    async def restarted(self, server: int, lost: RolloutClient, error: RolloutError) -> RolloutClient:
        return await self.replacements.successor(server, lost, error)
