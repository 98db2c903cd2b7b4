"""Weights through the memory of each device: engine ranks read the buckets of the trainer rank on their device."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.servers.weights import Bucket
from scalerl.rollout.sync.delivery import Delivery, Export, wait_all
from scalerl.rollout.sync.feed_groups import FeedGroups
from scalerl.rollout.sync.feeds import Feed
from scalerl.rollout.sync.transports.shared import load_blobs


class GatheredTransport:
    """Weights by the memory of each device: on GPUs (CUDA IPC), and where trainer ranks are on several machines.

    While servers load one bucket the next one is gathered.
    """

    has_session = True

    def __init__(self, export: Export, groups: FeedGroups) -> None:
        self.export, self.groups = export, groups

    def send(self, delivery: Delivery) -> tuple[int, int]:
        num_bytes = num_buckets = 0
        mine = [feed for feed in delivery.feeds if delivery.rank in feed.ranks]
        feeding = {rank for feed in delivery.feeds for rank in feed.ranks}
        sending: list[Future] = []
        # One thread: the ranks of a feed meet in it in the order of the buckets.
        with ThreadPoolExecutor(1) as thread:
            for named in self.export(delivery.bucket_bytes, lambda number: feeding):
                # What servers load is a copy, which is gone before that of this bucket is made.
                wait_all(sending)
                bucket = Bucket(named)
                num_bytes, num_buckets = num_bytes + bucket.num_bytes, num_buckets + 1
                parts = [(feed, *_serialized(bucket, feed, delivery.rank)) for feed in mine]
                sending = [thread.submit(self._send, delivery, *part) for part in parts]
                delivery.hash(named)
            wait_all(sending)
        return num_bytes, num_buckets

    def _send(self, delivery: Delivery, feed: Feed, blobs: dict[int, str], is_mapped: bool) -> None:
        """Sends one bucket to one server; collective over the feed's ranks.  blobs: of this rank, by engine rank."""
        blobs = self.groups.gather(feed, blobs)
        if feed.lead == delivery.rank:
            load_blobs(delivery, feed, [blobs[rank] for rank in range(feed.replica.tp_size)], is_mapped=is_mapped)
        # The bucket's memory must live until every engine rank has copied it.
        self.groups.wait(feed)

    def forget(self, index: int) -> None:
        """Does nothing: this transport keeps nothing of a server."""


def _serialized(bucket: Bucket, feed: Feed, rank: int) -> tuple[dict[int, str], bool]:
    """Serializes the bucket for each engine rank that this rank feeds; also returns whether they map its memory."""
    engine = ENGINES[feed.replica.engine]
    return {number: engine.serialize(bucket) for number in feed.engine_ranks(rank)}, bucket.is_mapped
