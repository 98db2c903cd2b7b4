"""Weights over the network: one trainer rank broadcasts to the ranks of a server. NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import Future, ThreadPoolExecutor

import torch.distributed as dist
from torch import Tensor

from scalerl.rollout.servers.update_group import (
    SENDER,
    address_towards,
    broadcast,
    in_sending_order,
    join_group,
    leave_group,
    open_store,
    pack_bytes,
)
from scalerl.rollout.sync.session import Export, Feed, SyncSession, Transport, wait_all

# How much longer a group's limit is than that of the request it serves: else NCCL's watchdog may end this rank when the
# request to a server that hangs is given up.
NCCL_GRACE_S = 300.0
_counter = itertools.count()
# Name, dtype and shape.
Described = tuple[str, str, list[int]]


class BroadcastTransport(Transport):
    """Weights by broadcast: each server has a process group with its lead, so that a lost one takes no other with it.

    The leads, far apart in the world, have every bucket and send at the same time; the other ranks have none. While one
    bucket is sent the next one is gathered.
    """

    def __init__(self, export: Export, *, backend: str, timeout_s: float) -> None:
        """Begins without groups.  backend: nccl | gloo.  timeout_s: of joining a group, and of one broadcast."""
        self.export, self.backend, self.timeout_s = export, backend, timeout_s
        # Index of a replica that this rank leads -> (name, group).
        self.groups: dict[int, tuple[str, dist.ProcessGroup]] = {}

    @property
    def group_timeout_s(self) -> float:
        """Limit of each broadcast in a group, as its backend enforces it."""
        return self.timeout_s + (NCCL_GRACE_S if self.backend == "nccl" else 0.0)

    def send(self, session: SyncSession) -> tuple[int, int]:
        total = num_buckets = 0
        for feed in session.led_feeds:
            if feed.index not in self.groups and feed.index not in session.failed:
                self._join(session, feed)
        sending: list[Future] = []
        with ThreadPoolExecutor(max(1, len(session.led_feeds))) as threads:
            leads = {feed.lead for feed in session.feeds}
            for named in self.export(session.bucket_bytes, lambda number: leads):
                # What is sent meanwhile is a copy, which goes before that of this bucket is made.
                wait_all(sending)
                sending.clear()
                named = in_sending_order(named)
                total, num_buckets = total + sum(tensor.nbytes for _, tensor in named), num_buckets + 1
                if session.led_feeds:
                    layout, flat = [_described(*item) for item in named], pack_bytes(named)
                    sending += [threads.submit(self._send, session, feed, layout, flat) for feed in session.led_feeds]
                    del flat
                    session.hash(named)
            wait_all(sending)
        return total, num_buckets

    def forget(self, index: int) -> None:
        """Leaves the group of a server that is gone or did not take part in a broadcast."""
        if index in self.groups:
            _, group = self.groups.pop(index)
            group.abort()
            leave_group(group)

    def _join(self, session: SyncSession, feed: Feed) -> None:
        """Makes the process group with a server; they meet at a store of this rank."""
        address = address_towards(feed.replica.url)
        store = open_store(address, self.timeout_s)
        # One name for the whole life of both processes.
        name = f"weights-{os.getpid()}-{next(_counter)}"
        size = 1 + feed.replica.tp_size
        threads = ThreadPoolExecutor(2)
        server = threads.submit(
            session.call,
            feed,
            None,
            lambda client: client.ask(
                client.engine.join_update_group(
                    address, store.port, rank_offset=SENDER + 1, world_size=size, group_name=name, backend=self.backend
                )
            ),
        )
        here = threads.submit(
            join_group,
            store,
            name=name,
            rank=SENDER,
            world_size=size,
            backend=self.backend,
            timeout_s=self.group_timeout_s,
        )
        server.result()
        # Where the server did not join, this rank's thread waits in vain, and ends by its own limit.
        threads.shutdown(wait=False)
        if feed.index in session.failed:
            return
        if error := here.exception():
            session.mark_failed(feed, f"no process group with {feed.replica.url}: {error}; see the server's log")
        else:
            self.groups[feed.index] = name, here.result()

    def _send(self, session: SyncSession, feed: Feed, layout: list[Described], flat: Tensor) -> None:
        if feed.index in session.failed:
            return
        name, group = self.groups[feed.index]
        threads = ThreadPoolExecutor(2)
        server = threads.submit(
            session.call,
            feed,
            "bucket",
            lambda client: client.ask(
                client.engine.update_weights_from_group(layout, group_name=name, policy_version=session.policy_version)
            ),
        )
        here = threads.submit(broadcast, flat, group)
        # Where the server takes no part the thread here waits in vain: gloo has no way to call it back.
        threads.shutdown(wait=False)
        server.result()
        if feed.index not in session.failed and (error := here.exception()):
            session.mark_failed(
                feed, f"broadcast of weights to {feed.replica.url} failed: {error}; see the server's log"
            )
        if feed.index in session.failed:
            self.forget(feed.index)


def _described(name: str, tensor: Tensor) -> Described:
    return name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
