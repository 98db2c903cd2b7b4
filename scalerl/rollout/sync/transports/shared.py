"""Weights through the memory of one machine: every rank writes its part, servers read. On CPUs."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch.distributed as dist

from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.servers.weights import Bucket
from scalerl.rollout.sync.delivery import Delivery, wait_all
from scalerl.rollout.sync.feeds import Feed
from scalerl.rollout.sync.node_buckets import NodeBuckets


class SharedTransport:
    """Weights by memory of one machine: each byte is copied twice, by trainer and server, whatever the layout."""

    has_session = True

    def __init__(self, buckets: NodeBuckets) -> None:
        self.buckets = buckets

    def send(self, delivery: Delivery) -> tuple[int, int]:
        """Sends all buckets: while the ranks write one, servers load and leads hash the one before."""
        num_bytes = 0
        pending: list[Future] = []
        num_threads = max(1, len(delivery.led_feeds) + len(delivery.expected))
        with self.buckets.room(delivery.bucket_bytes), ThreadPoolExecutor(num_threads) as threads:
            for number in range(len(self.buckets)):
                bucket = self.buckets.write(number)
                num_bytes += bucket.num_bytes
                wait_all(pending)
                # Now this bucket is whole, and nobody reads from where the next one goes.
                dist.barrier()
                pending = [threads.submit(load_bucket, delivery, feed, bucket) for feed in delivery.led_feeds]
                pending += [threads.submit(checksums.add, bucket.named) for checksums in delivery.expected.values()]
            wait_all(pending)
        return num_bytes, len(self.buckets)

    def forget(self, index: int) -> None:
        """Does nothing: this transport keeps nothing of a server."""


def load_bucket(delivery: Delivery, feed: Feed, bucket: Bucket) -> None:
    engine = ENGINES[feed.replica.engine]
    blobs = [engine.serialize(bucket) for _ in range(feed.replica.tp_size)]
    load_blobs(delivery, feed, blobs, is_mapped=bucket.is_mapped)


def load_blobs(delivery: Delivery, feed: Feed, blobs: list[str], *, is_mapped: bool) -> None:
    """Has one server load a bucket. blobs: one per engine rank.  is_mapped: as `Bucket.is_mapped`."""
    # Cached prefixes were computed with the old weights. SGLang's /flush_cache would collect garbage besides, up to a
    # second of every step on a CPU.
    delivery.call(
        feed,
        "bucket",
        lambda client: client.update_weights(
            blobs, flush_cache=True, policy_version=delivery.policy_version, is_mapped=is_mapped
        ),
    )
