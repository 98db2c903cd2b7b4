"""Weights through the memory of each device: engine ranks read the buckets of the trainer rank on their device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import torch.distributed as dist

from scalerl.hybrid.delivery import Delivery, Export, wait_all
from scalerl.hybrid.feeds import Feed
from scalerl.hybrid.transports.shared import load_blobs
from scalerl.servers.engines import ENGINES
from scalerl.servers.weights import Bucket


class GatheredTransport:
    """Weights by the memory of each device: on GPUs (CUDA IPC), and where trainer ranks are on several machines.

    While servers load one bucket the next one is gathered.
    """

    has_session = True

    def __init__(self, export: Export, feeds: Sequence[Feed]) -> None:
        """Makes the process groups of feeds with several ranks; collective."""
        self.export = export
        self.groups: dict[int, dist.ProcessGroup] = {}
        for feed in feeds:
            distinct = sorted(set(feed.ranks))
            if len(distinct) > 1:
                # Every rank creates every group.
                self.groups[feed.index] = cast("dist.ProcessGroup", dist.new_group(distinct, backend="gloo"))

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
        group = self.groups.get(feed.index)
        if group is None:
            load_blobs(delivery, feed, [blobs[rank] for rank in range(feed.replica.tp_size)], is_mapped=is_mapped)
            return
        is_lead = feed.lead == delivery.rank
        gathered: list | None = [None] * dist.get_world_size(group) if is_lead else None
        dist.gather_object(blobs, gathered, dst=feed.lead, group=group)
        if is_lead:
            blobs = {rank: blob for part in gathered or [] for rank, blob in part.items()}
            load_blobs(delivery, feed, [blobs[rank] for rank in range(feed.replica.tp_size)], is_mapped=is_mapped)
        # The bucket's memory must live until every engine rank has copied it.
        dist.barrier(group)

    def forget(self, index: int) -> None:
        """Does nothing: this transport keeps nothing of a server."""


def _serialized(bucket: Bucket, feed: Feed, rank: int) -> tuple[dict[int, str], bool]:
    """A copy of the bucket for each engine rank of the feed that this rank feeds, and whether they map it instead."""
    engine = ENGINES[feed.replica.engine]
    blobs = {number: engine.serialize(bucket) for number, maker in enumerate(feed.ranks) if maker == rank}
    return blobs, bucket.is_mapped
