"""`ServerControl`: what is asked of servers beside samples and weights, of all of them at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from scalerl.runtime.threads import in_daemon
from scalerl.servers.client import RolloutClient
from scalerl.servers.replica import ClientSettings, Replica
from scalerl.servers.requests import RolloutError

# What leaves and comes back with a part. A CUDA graph has memory of its own beside that of the weights which it reads.
_TAGS = {"kv_cache": ("kv_cache",), "weights": ("weights", "cuda_graph")}


class ServerControl:
    """Asks the servers itself, whoever sends them prompts.

    What it paused and released it knows of each server; a successor that is `put` in the place of one is neither.
    """

    def __init__(self, settings: ClientSettings, replicas: Sequence[Replica]) -> None:
        self.settings = settings
        self.clients = [settings.client(replica) for replica in replicas]

    def put(self, index: int, successor: Replica) -> None:
        self.clients[index] = self.settings.client(successor)

    def pause(self) -> dict[int, str]:
        """Running samples are interrupted where they are and wait. -> index: error of servers that did not."""
        return self._ask_each(RolloutClient.pause, range(len(self.clients)))

    def go_on(self) -> dict[int, str]:
        """What `pause` interrupted goes on, under the weights that its server has now. -> as `pause`."""
        paused = [index for index, client in enumerate(self.clients) if client.paused]
        return self._ask_each(RolloutClient.continue_generation, paused)

    def release(self, tag: str, skip: Collection[int] = ()) -> dict[int, str]:
        """Frees that part (kv_cache, weights) of the servers' device memory. -> as `pause`.

        skip: indices of servers that are not asked.
        """
        asked = [index for index in range(len(self.clients)) if index not in skip]
        return self._ask_each(lambda client: client.release(_TAGS[tag]), asked)

    def resume(self, tag: str) -> dict[int, str]:
        """Undoes `release` where it was. -> as `pause`."""
        released = [index for index, client in enumerate(self.clients) if tag in client.released]
        return self._ask_each(lambda client: client.resume(_TAGS[tag]), released)

    def are_well(self, indices: Iterable[int]) -> Mapping[int, bool]:
        """`RolloutClient.is_well` of each of these."""

        async def ask() -> dict[int, bool]:
            asked = list(indices)
            return dict(zip(asked, await asyncio.gather(*(self.clients[i].is_well() for i in asked)), strict=True))

        return asyncio.run(ask())

    def _ask_each(self, call: Callable[[RolloutClient], None], indices: Sequence[int]) -> dict[int, str]:
        answers = {index: in_daemon(partial(call, self.clients[index]), f"server {index}") for index in indices}
        failed = {}
        for index, answer in answers.items():
            error = answer.exception()
            if isinstance(error, RolloutError):
                failed[index] = str(error)
            elif error is not None:
                raise error
        return failed
