"""Recovery from the loss of a server: how it comes back into service, and how generations get over it.

`ServerRecovery` is the way back, for the servers of every purpose. `GenerationRecovery` waits for successors in
`Replacements`, where whoever restarts servers reads what was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from scalerl.rollout.servers.replica import ClientSettings, Replica

if TYPE_CHECKING:
    from scalerl.rollout.servers.client import RolloutClient
    from scalerl.rollout.servers.requests import GenerateRequest, RolloutError


@dataclass(frozen=True)
class LostServer:
    """A server that died or does not answer, as a generation noticed it.

    index: of the replica.  url: of the server that was lost; a successor has another.  why: what was noticed.
    """

    index: int
    url: str
    why: str


class Restartable(Protocol):
    """A set of servers whose processes are ended and started again, as `server_set.ServerSet` is.

    down: index of a server without a process -> how it ended.
    """

    down: dict[int, str]

    def end_lost(self, lost: Sequence[LostServer]) -> bool: ...

    def restart_down(self) -> dict[int, Replica]: ...

    def end_failed(self, failed: Mapping[int, str]) -> None: ...


class Callers(Protocol):
    """Those who ask a set of servers for samples, as they are told of servers that were restarted."""

    def replace(self, successors: Mapping[int, Replica]) -> None:
        """Takes successors, index -> address; they are asked for nothing before `in_service`."""
        ...

    def in_service(self, indices: Sequence[int]) -> None:
        """Asks these servers from now on; whoever waited for them continues."""
        ...


# (successors by index, servers that run and are to get the same) -> index -> why that server failed meanwhile.
BeforeService = Callable[[Mapping[int, Replica], Collection[int]], Mapping[int, str]]


def nothing_before_service(successors: Mapping[int, Replica], running: Collection[int]) -> Mapping[int, str]:
    """The hook of servers that serve files: a restarted one has what it needs."""
    return {}


class ServerRecovery:
    """The way back into service of a set's lost servers.

    lost -> ended -> restarted -> callers know the successor -> before_service -> in service. The policy's servers get
    the trainer's weights in `before_service`, those of other purposes need nothing.
    """

    def __init__(
        self, servers: Restartable, callers: Callers, before_service: BeforeService = nothing_before_service
    ) -> None:
        self.servers, self.callers, self.before_service = servers, callers, before_service

    def replace(self, lost: Sequence[LostServer]) -> bool:
        """Brings lost servers back, and those that are down; returns whether any of the lost ones had no successor.

        Raises RolloutError when a server may not be restarted again, or refuses what it needs before it serves.
        """
        if not self.servers.end_lost(lost):
            return False
        self.serve()
        return True

    def serve(self, running: Collection[int] = (), *, before_service: BeforeService | None = None) -> None:
        """Brings servers that are down into service; nothing is asked of anybody where none is.

        running: indices of servers that are up and get what is needed before service together with them.
        before_service: in the place of the set's, this time. A server that fails in it is restarted and gets it again.
        """
        before_service = before_service or self.before_service
        while running or self.servers.down:
            successors = self.servers.restart_down()
            if successors:
                self.callers.replace(successors)
            failed = before_service(successors, set(running) - successors.keys())
            self.servers.end_failed(failed)
            if returned := sorted(successors.keys() - failed.keys()):
                self.callers.in_service(returned)
            running = ()


class Replacements:
    """Tracks which servers of a set are lost, and wakes those who wait for successors; in the generations' event loop.

    clients[i]: client of replica i; `put` replaces it.
    """

    def __init__(self, settings: ClientSettings, replicas: Sequence[Replica]) -> None:
        self.settings = settings
        self.clients = [settings.client(replica) for replica in replicas]
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

    async def successor(self, index: int, lost: RolloutClient, error: RolloutError) -> RolloutClient:
        """Reports the loss, then waits until the successor is in service."""
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


class GenerationRecovery:
    """`rollout.dispatcher.Recovery` of one generation on some of the servers."""

    def __init__(self, replacements: Replacements, indices: Sequence[int] | None = None) -> None:
        """Serves one generation.  indices[i]: the replica behind its i-th client; None: all, in order."""
        self.replacements, self.indices = replacements, indices
        # Samples that were asked again because their server was lost.
        self.num_samples = 0

    def resubmitted(self, request: GenerateRequest) -> None:
        self.num_samples += request.n

    async def restarted(self, server: int, lost: RolloutClient, error: RolloutError) -> RolloutClient:
        index = server if self.indices is None else self.indices[server]
        return await self.replacements.successor(index, lost, error)


class CallersInLoop:
    """`Callers` of `Replacements` in the running event loop, told of successors by another thread."""

    def __init__(self, replacements: Replacements) -> None:
        self.replacements, self.loop = replacements, asyncio.get_running_loop()

    def replace(self, successors: Mapping[int, Replica]) -> None:
        async def put() -> None:
            self.replacements.put(successors)

        self._run(put())

    def in_service(self, indices: Sequence[int]) -> None:
        self._run(self.replacements.in_service(indices))

    def _run(self, told: Coroutine[Any, Any, None]) -> None:
        # Closed, as it never runs where the loop has ended meanwhile.
        with contextlib.closing(told):
            asyncio.run_coroutine_threadsafe(told, self.loop).result()
