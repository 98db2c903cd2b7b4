"""`Delivery`: one weight sync in progress, what this rank tells the servers that it leads, and which of them failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from scalerl.rollout.servers.client import RolloutClient, RolloutError
from scalerl.rollout.servers.weights import ExpectedChecksums, NamedTensors
from scalerl.rollout.sync.feeds import Feed
from scalerl.rollout.sync.order import Step, SyncOrder

if TYPE_CHECKING:
    # Not for a driver, which imports this module: that one imports megatron.
    from scalerl.parallel.export import Needed

# (most bytes of a bucket, which ranks need it) -> the model under its Hugging Face names, bucket by bucket. Collective:
# every rank must consume all buckets; those that it does not need are empty.
Export = Callable[[int, "Needed"], Iterator[NamedTensors]]


class Delivery:
    """One weight sync as a trainer rank sees it: which servers take part, which ones it leads, and which failed.

    feeds: of the replicas that take part, the same on every rank. led_feeds: those whose server this rank talks to.
    """

    def __init__(
        self,
        feeds: Sequence[Feed],
        clients: Mapping[str, RolloutClient],
        expected: Mapping[int, ExpectedChecksums],
        *,
        rank: int,
        policy_version: int,
        bucket_bytes: int,
        verify: bool,
        orders: Mapping[int, SyncOrder] | None = None,
    ) -> None:
        """Prepares the sync of one policy version.

        clients: URL -> client.  verify: the same on every rank.
        orders: index of a replica -> where its server is in the order of its steps; None: drained, weights in place.
        expected: index of a replica -> the checksums of the ranks of its server that this rank feeds; empty where they
            are not compared.
        """
        self.feeds, self.rank, self.policy_version, self.verify = feeds, rank, policy_version, verify
        self.bucket_bytes = bucket_bytes
        self.led_feeds = [feed for feed in feeds if feed.lead == rank]
        self.expected = expected
        # Index of a replica that this rank leads -> how its server failed.
        self.failed: dict[int, str] = {}
        self._clients = clients
        # Of the servers that this rank leads.
        self.orders = {
            feed.index: SyncOrder(feed.replica.url, serving=False) if orders is None else orders[feed.index]
            for feed in self.led_feeds
        }

    def call(self, feed: Feed, step: Step | None, request: Callable[[RolloutClient], Any]) -> Any:
        """Calls one server and returns its answer; None from a server that failed now or earlier in this sync.

        A failure does not end the sync: other ranks wait for this one in collectives, other servers for their weights.
        step: the SyncOrder step that this call performs; None if it performs none. Raises WrongOrderError before the
        server is asked.
        """
        if feed.index in self.failed:
            return None
        if step is not None:
            self.orders[feed.index].advance(step)
        try:
            return request(self._clients[feed.replica.url])
        except RolloutError as error:
            self.mark_failed(feed, str(error))
            return None

    def mark_failed(self, feed: Feed, why: str) -> None:
        """Notes that a server failed; the first reason is kept."""
        self.failed.setdefault(feed.index, why)

    def hash(self, named: NamedTensors) -> None:
        """Adds a bucket to the checksums that this rank makes."""
        for checksums in self.expected.values():
            checksums.add(named)


def wait_all(pending: Sequence[Future]) -> None:
    for future in pending:
        future.result()
