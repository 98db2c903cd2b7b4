"""Trainer weights -> rollout servers: begin, buckets, end, and the proof that they arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from scalerl.errors import UserError
from scalerl.hybrid.node_buckets import NodeBuckets
from scalerl.hybrid.order import SyncOrder
from scalerl.hybrid.replicas import Replica, plan_feeds
from scalerl.parallel.engine import MegatronEngine
from scalerl.rollout.client import RolloutClient, RolloutError
from scalerl.rollout.weights import Bucket, ExpectedChecksums, checksum_differences


class WeightSyncError(UserError, RuntimeError):
    """A server does not serve the trainer's weights."""


@dataclass(frozen=True)
class _Feed:
    """The ranks that feed one replica: ranks[i] makes the bucket of engine rank i; ranks[0] talks to the server."""

    index: int
    replica: Replica
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None

    @property
    def lead(self) -> int:
        return self.ranks[0]


class WeightSync:
    """Built once per run; `sync` is collective over the trainer's world."""

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
    ) -> None:
        """model_config: the model's config.json, which tells how a server cuts and fuses the tensors it checks.

        dtype: what the servers store; None: as the engine's.
        """
        self.engine, self.model_config, self.bucket_bytes = engine, model_config, bucket_bytes
        self.rank, self.dtype = dist.get_rank(), dtype
        self.feeds = []
        for index, (replica, ranks) in enumerate(
            zip(replicas, plan_feeds(replicas, dist.get_world_size()), strict=True)
        ):
            distinct = sorted(set(ranks))
            # Collective: every rank creates every group.
            group = dist.new_group(distinct, backend="gloo") if len(distinct) > 1 else None
            self.feeds.append(_Feed(index, replica, ranks, group))
        self.max_model_len, self.timeout_s = max_model_len, timeout_s
        self.clients = {feed.replica.url: self._client(feed) for feed in self.feeds if feed.lead == self.rank}
        self.node_buckets = NodeBuckets(engine, bucket_bytes) if NodeBuckets.possible(engine) else None
        # Index of a replica that this rank talks to -> how far the sync in progress is with it.
        self.orders: dict[int, SyncOrder] = {}
        # Index of a replica that this rank talks to -> what its server did not do in the sync in progress.
        self.failed: dict[int, str] = {}

    def _client(self, feed: _Feed) -> RolloutClient:
        replica = feed.replica
        return RolloutClient(replica.url, replica.kind, max_model_len=self.max_model_len, timeout_s=self.timeout_s)

    def reconnect(self, successors: Mapping[int, Replica]) -> None:
        """Index -> the server that took the place of a lost one: another address, fed by the same ranks."""
        for index, successor in successors.items():
            self.clients.pop(self.feeds[index].replica.url, None)
            feed = self.feeds[index] = replace(self.feeds[index], replica=successor)
            if feed.lead == self.rank:
                self.clients[successor.url] = self._client(feed)

    def sync(
        self, policy_version: int, *, verify: bool, only: Collection[int] | None = None, raise_errors: bool = True
    ) -> dict[str, Any]:
        """Every server then samples with the engine's weights and says policy_version.

        only: indices of the replicas that take part; None: all.
        raise_errors: False hands back the servers that failed as "failed": {replica's index: error}.

        Returns {"sync_s", "verify_s", "num_bytes", "num_buckets", "failed"}. Raises WeightSyncError naming tensors that
        differ (verify=True), RolloutError for a server that failed; the others have the weights then.
        """
        start = time.perf_counter()
        self.failed = {}
        mine = [feed for feed in self.feeds if self.rank in feed.ranks and (only is None or feed.index in only)]
        led = [feed for feed in mine if feed.lead == self.rank]
        self.orders = {feed.index: SyncOrder(feed.replica.url, serving=False) for feed in led}
        expected = [
            ExpectedChecksums(self.model_config, f.replica.tp_size, f.replica.kind, self.dtype) for f in led if verify
        ]
        for feed in led:
            self.orders[feed.index].take("begin")
            self._tell(feed, RolloutClient.begin_weight_update)
        if self.node_buckets is not None:
            num_bytes, num_buckets = self._send_shared(self.node_buckets, led, expected, policy_version)
        else:
            num_bytes, num_buckets = self._send_gathered(mine, expected, policy_version)
        for feed in led:
            self.orders[feed.index].take("end")
            self._tell(feed, lambda client: client.end_weight_update(policy_version))
        sent_s = time.perf_counter() - start
        for feed, checksums in zip(led, expected, strict=verify):
            self._verify(feed, checksums, policy_version)
        dist.barrier()
        if self.failed and raise_errors:
            raise RolloutError("; ".join(self.failed.values()))
        return {
            "sync_s": sent_s,
            "verify_s": time.perf_counter() - start - sent_s,
            "num_bytes": float(num_bytes),
            "num_buckets": float(num_buckets),
            "failed": self.failed,
        }

    def _tell(self, feed: _Feed, call: Callable[[RolloutClient], Any]) -> Any:
        """None, now and later in this sync, from a server that fails: the other ranks wait for this one in
        collectives, and the other servers for their weights."""
        if feed.index in self.failed:
            return None
        try:
            return call(self.clients[feed.replica.url])
        except RolloutError as error:
            self.failed[feed.index] = str(error)
            return None

    def _send_shared(
        self, buckets: NodeBuckets, led: list[_Feed], expected: list[ExpectedChecksums], policy_version: int
    ) -> tuple[int, int]:
        """-> bytes and buckets. While the ranks write a bucket, servers load and leads hash the one before."""
        num_bytes = 0
        pending: list[Future] = []
        with buckets.room(), ThreadPoolExecutor(max(1, len(led) + len(expected))) as threads:
            for number in range(len(buckets)):
                bucket = buckets.write(number)
                num_bytes += bucket.num_bytes
                _wait(pending)
                # Now this bucket is whole, and nobody reads from where the next one goes.
                dist.barrier()
                pending = [threads.submit(self._send, feed, bucket, policy_version) for feed in led]
                pending += [threads.submit(checksums.add, bucket.named) for checksums in expected]
            _wait(pending)
        return num_bytes, len(buckets)

    def _send_gathered(
        self, mine: list[_Feed], expected: list[ExpectedChecksums], policy_version: int
    ) -> tuple[int, int]:
        """-> bytes and buckets. Every rank has every bucket, on its own device."""
        num_bytes = num_buckets = 0
        for named in self.engine.export_buckets(self.bucket_bytes):
            bucket = Bucket(named)
            num_bytes, num_buckets = num_bytes + bucket.num_bytes, num_buckets + 1
            for feed in mine:
                self._send(feed, bucket, policy_version)
            for checksums in expected:
                checksums.add(named)
        return num_bytes, num_buckets

    def _send(self, feed: _Feed, bucket: Bucket, policy_version: int) -> None:
        """Collective over the feed's ranks, unless the bucket is shared: then the lead's business alone."""
        is_collective = bucket.shared is None and feed.group is not None
        makers = feed.ranks if is_collective else [self.rank] * len(feed.ranks)
        blobs = {rank: bucket.serialize(feed.replica.kind) for rank, maker in enumerate(makers) if maker == self.rank}
        if is_collective:
            gathered: list | None = [None] * dist.get_world_size(feed.group) if feed.lead == self.rank else None
            dist.gather_object(blobs, gathered, dst=feed.lead, group=feed.group)
            blobs = {rank: blob for part in gathered or [] for rank, blob in part.items()}
        if feed.lead == self.rank:
            # Cached prefixes were computed with the old weights. SGLang's /flush_cache would collect garbage besides,
            # up to a second of every step on a CPU.
            in_order = [blobs[rank] for rank in range(feed.replica.tp_size)]
            self.orders[feed.index].take("bucket")
            self._tell(
                feed,
                lambda client: client.update_weights(in_order, flush_cache=True, policy_version=policy_version),
            )
        if is_collective:
            # The bucket's memory must live until every engine rank has copied it.
            dist.barrier(feed.group)

    def _verify(self, feed: _Feed, expected: ExpectedChecksums, policy_version: int) -> None:
        self.orders[feed.index].take("check")
        found = self._tell(feed, RolloutClient.checksums)
        if found is None:
            return
        wrong = checksum_differences(expected.result(), found)
        if wrong:
            raise WeightSyncError(
                f"{feed.replica.url} does not serve policy version {policy_version}: {len(wrong)} tensors differ "
                f"from the trainer's. " + "; ".join(wrong[:5])
            )


def _wait(pending: list[Future]) -> None:
    for future in pending:
        future.result()
