"""Requests to several servers at the same time: pause, continue, health, and the sizes of their caches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from scalerl.base.process import in_daemon
from scalerl.rollout.servers.client import RolloutClient
from scalerl.rollout.servers.requests import RolloutError

T = TypeVar("T")
# Index of a replica -> client of its server.
Clients = Mapping[int, RolloutClient]


def pause(clients: Clients) -> dict[int, str]:
    """Interrupts running samples where they are; they wait. Returns index -> error, of servers that failed."""
    return _failures(RolloutClient.pause, clients)


def continue_generation(clients: Clients) -> dict[int, str]:
    """Continues the samples that `pause` interrupted, with the weights that the server has now. Returns as `pause`."""
    paused = {index: client for index, client in clients.items() if client.paused}
    return _failures(RolloutClient.continue_generation, paused)


def are_well(clients: Clients) -> dict[int, bool]:
    """Whether each server does its work (`RolloutClient.is_well`)."""

    async def ask() -> list[bool]:
        return await asyncio.gather(*(client.is_well() for client in clients.values()))

    return dict(zip(clients, asyncio.run(ask()), strict=True))


def small_caches(clients: Clients, tokens: int | None) -> Iterator[str]:
    """One sentence for each server whose KV cache is smaller than configured; an engine with less memory takes fewer.

    tokens: `kv_cache_tokens`; None: no number was given, and no server is asked.  Raises RolloutError.
    """
    if tokens is None:
        return
    for index, answer in _answers(RolloutClient.cache_size, clients).items():
        size, client = answer.result(), clients[index]
        if size is not None and size.is_below(tokens):
            key = client.purpose.key("kv_cache_tokens")
            yield (
                f"{client.purpose.who} {index} ({client.url}) has a KV cache of {size.num_tokens} tokens, not the "
                f"{tokens} of the memory plan or of {key}: its device has less free memory than planned. Find what "
                f"else is on it (nvidia-smi), or set {key}={size.num_tokens}"
            )


def _answers(call: Callable[[RolloutClient], T], clients: Clients) -> dict[int, Future[T]]:
    return {index: in_daemon(partial(call, client), f"server {index}") for index, client in clients.items()}


def _failures(call: Callable[[RolloutClient], None], clients: Clients) -> dict[int, str]:
    failed = {}
    for index, answer in _answers(call, clients).items():
        error = answer.exception()
        if isinstance(error, RolloutError):
            failed[index] = str(error)
        elif error is not None:
            raise error
    return failed
