"""`WeightSync`: gives rollout servers the trainer's weights, and compares checksums to prove that they arrived."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from scalerl.errors import RunError
from scalerl.parallel.engine import MegatronEngine
from scalerl.parallel.export import largest_bytes
from scalerl.rollout.servers.client import RolloutClient, RolloutError
from scalerl.rollout.servers.purpose import POLICY
from scalerl.rollout.servers.replica import ClientSettings, Replica
from scalerl.rollout.servers.weights import checksum_differences
from scalerl.rollout.sync.delivery import Delivery
from scalerl.rollout.sync.feed_groups import FeedGroups
from scalerl.rollout.sync.feeds import Feed, feeds_of
from scalerl.rollout.sync.handover import BUCKET_COPIES, agreed_bucket_bytes, free_for_buckets, hashed_expert_bytes
from scalerl.rollout.sync.order import SyncOrder
from scalerl.rollout.sync.transports import TransportName
from scalerl.rollout.sync.transports.create import make_transport


class WeightSyncError(RunError):
    """Raised when a server does not serve the trainer's weights."""


class WeightSync:
    """Sends the trainer's weights to the servers. Built once per run; `sync` is collective over the trainer's world."""

    def __init__(
        self,
        engine: MegatronEngine,
        replicas: Sequence[Replica],
        model_config: Mapping[str, Any],
        *,
        bucket_bytes: int,
        max_model_len: int,
        timeout_s: float,
        dtype: torch.dtype | None = None,
        transport: TransportName = "shared",
        directory: str | None = None,
        model_path: str | None = None,
    ) -> None:
        """Connects to the servers that this rank leads; collective.

        model_config: the model's config.json, which tells how a server cuts and fuses the tensors it checks.
        timeout_s: of a request to a server, and of a broadcast.
        dtype: what the servers store; None: as the engine's.
        directory, model_path: of transport disk: where the weights go, where the rest of the model is.
        """
        self.engine, self.model_config, self.bucket_bytes = engine, model_config, bucket_bytes
        self.rank, self.dtype = dist.get_rank(), dtype
        self.max_model_len, self.timeout_s = max_model_len, timeout_s
        self.feeds = feeds_of(transport, replicas, dist.get_world_size())
        self.clients = {feed.replica.url: self._client(feed) for feed in self.feeds if feed.lead == self.rank}
        self.groups = FeedGroups(self.feeds)
        self.transport = make_transport(
            transport,
            engine,
            self.groups,
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            directory=directory,
            model_path=model_path,
        )

    def _client(self, feed: Feed) -> RolloutClient:
        # It asks for no samples.
        return ClientSettings(POLICY, self.max_model_len, self.timeout_s, max_concurrency=1).client(feed.replica)

    def reconnect(self, successors: Mapping[int, Replica]) -> None:
        """Connects to successors of lost servers: index -> replica at another address, fed by the same ranks."""
        for index, successor in successors.items():
            self.transport.forget(index)
            self.clients.pop(self.feeds[index].replica.url, None)
            feed = self.feeds[index] = replace(self.feeds[index], replica=successor)
            if feed.lead == self.rank:
                self.clients[successor.url] = self._client(feed)

    def close(self) -> None:
        """Frees what the transport holds for all servers; not collective."""
        for feed in self.feeds:
            self.transport.forget(feed.index)

    def sync(
        self,
        policy_version: int,
        *,
        verify: bool,
        orders: Mapping[int, SyncOrder] | None = None,
        raise_errors: bool = True,
    ) -> dict[str, Any]:
        """Gives servers the engine's weights, with which they sample as policy_version from then on.

        orders: as `Delivery`, of the replicas that take part; None: all take part.
        raise_errors: False hands back the servers that failed as "failed": {replica's index: error}.

        Returns {"sync_s", "verify_s", "num_bytes", "num_buckets", "bucket_bytes", "failed", "orders"}: num_bytes as
        `Transport.send` has them; orders of the servers that this rank leads, as they are now. Raises WeightSyncError
        naming tensors that differ (verify=True), RolloutError for a server that failed (the others have the weights
        then), HandoverError where the largest tensor has no room.
        """
        start = time.perf_counter()
        bucket_bytes = self._agree_on_buckets(verify=verify)
        delivery = self._delivery(policy_version, verify=verify, orders=orders, bucket_bytes=bucket_bytes)
        for feed in delivery.led_feeds:
            delivery.call(feed, "begin", self._begin)
        num_bytes, num_buckets = self.transport.send(delivery)
        for feed in delivery.led_feeds:
            delivery.call(feed, "end", lambda client: client.end_weight_update(policy_version))
        sent_s = time.perf_counter() - start
        if verify:
            self._verify(delivery)
        dist.barrier()
        if delivery.failed and raise_errors:
            raise RolloutError("; ".join(delivery.failed.values()))
        return {
            "sync_s": sent_s,
            "verify_s": time.perf_counter() - start - sent_s,
            "num_bytes": float(num_bytes),
            "num_buckets": float(num_buckets),
            "bucket_bytes": float(bucket_bytes),
            "failed": delivery.failed,
            "orders": delivery.orders,
        }

    def _agree_on_buckets(self, *, verify: bool) -> int:
        """The bucket size of this sync: self.bucket_bytes, or less where free memory is short; collective."""
        engine = self.engine
        itemsize = next(engine.chunks[0].parameters()).element_size()
        free_bytes, device = free_for_buckets(engine.device)
        if verify and engine.device == "cuda":
            hashed = sum(
                hashed_expert_bytes(
                    engine.shape, itemsize, feed.replica.tp_size, num_ranks=len(feed.engine_ranks(self.rank))
                )
                for feed in self.feeds
            )
            free_bytes = max(0, free_bytes - hashed)
        return agreed_bucket_bytes(
            free_bytes,
            device,
            limit_bytes=self.bucket_bytes,
            largest_bytes=largest_bytes(engine.family, engine.shape, itemsize),
            num_copies=BUCKET_COPIES,
        )

    def _delivery(
        self, policy_version: int, *, verify: bool, orders: Mapping[int, SyncOrder] | None, bucket_bytes: int
    ) -> Delivery:
        feeds = [feed for feed in self.feeds if orders is None or feed.index in orders]
        expected = {
            feed.index: feed.replica.expected_checksums(self.model_config, self.dtype, ranks)
            for feed in feeds
            if verify and (ranks := feed.engine_ranks(self.rank))
        }
        return Delivery(
            feeds,
            self.clients,
            expected,
            rank=self.rank,
            policy_version=policy_version,
            bucket_bytes=bucket_bytes,
            verify=verify,
            orders=orders,
        )

    def _verify(self, delivery: Delivery) -> None:
        """Compares what servers have with what they must have; collective over the ranks of each feed."""
        expected = {}
        for feed in delivery.feeds:
            if self.rank in feed.ranks:
                expected[feed.index] = self.groups.gather(feed, delivery.expected[feed.index].by_rank())
        for feed in delivery.led_feeds:
            self._compare(delivery, feed, expected[feed.index])

    def _compare(self, delivery: Delivery, feed: Feed, expected: Mapping[int, dict[str, str]]) -> None:
        served = delivery.call(feed, "check", RolloutClient.checksums)
        if served is None:
            return
        wrong = checksum_differences([expected[rank] for rank in sorted(expected)], served)
        if wrong:
            raise WeightSyncError(
                f"{feed.replica.url} does not serve policy version {delivery.policy_version}: {len(wrong)} tensors "
                "differ from the trainer's. " + "; ".join(wrong[:5])
            )

    def _begin(self, client: RolloutClient) -> None:
        if self.transport.has_session:
            client.begin_weight_update()
