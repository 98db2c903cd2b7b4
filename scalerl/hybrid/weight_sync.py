"""Trainer weights -> rollout servers: begin, buckets, end, and the proof that they arrived."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scalerl.errors import UserError
from scalerl.hybrid.replicas import Replica, plan_feeds
from scalerl.parallel.engine import MegatronEngine
from scalerl.rollout.client import RolloutClient
from scalerl.rollout.weights import ExpectedChecksums, checksum_differences, serialize_bucket


class WeightSyncError(UserError, RuntimeError):
    """A server does not serve the trainer's weights."""


@dataclass(frozen=True)
class _Feed:
    """The ranks that feed one replica: ranks[i] makes the bucket of engine rank i; ranks[0] talks to the server."""

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
        for replica, ranks in zip(replicas, plan_feeds(replicas, dist.get_world_size()), strict=True):
            distinct = sorted(set(ranks))
            # Collective: every rank creates every group.
            group = dist.new_group(distinct, backend="gloo") if len(distinct) > 1 else None
            self.feeds.append(_Feed(replica, ranks, group))
        self.clients = {
            feed.replica.url: RolloutClient(
                feed.replica.url, feed.replica.kind, max_model_len=max_model_len, timeout_s=timeout_s
            )
            for feed in self.feeds
            if feed.lead == self.rank
        }

    def sync(self, policy_version: int, *, verify: bool) -> dict[str, float]:
        """Every server then samples with the engine's weights and says policy_version.

        Returns {"sync_s", "verify_s", "num_bytes"}. Raises WeightSyncError naming tensors that differ (verify=True).
        """
        start = time.perf_counter()
        mine = [feed for feed in self.feeds if self.rank in feed.ranks]
        led = [feed for feed in mine if feed.lead == self.rank]
        expected = [
            ExpectedChecksums(self.model_config, f.replica.tp_size, f.replica.kind, self.dtype) for f in led if verify
        ]
        for feed in led:
            self.clients[feed.replica.url].begin_weight_update()
        num_bytes = 0
        for bucket in self.engine.export_buckets(self.bucket_bytes):
            num_bytes += sum(tensor.nbytes for _, tensor in bucket)
            for feed in mine:
                self._send(feed, bucket, policy_version)
            for checksums in expected:
                checksums.add(bucket)
        for feed in led:
            self.clients[feed.replica.url].end_weight_update(policy_version)
        sent_s = time.perf_counter() - start
        for feed, checksums in zip(led, expected, strict=verify):
            self._verify(feed, checksums, policy_version)
        dist.barrier()
        return {"sync_s": sent_s, "verify_s": time.perf_counter() - start - sent_s, "num_bytes": float(num_bytes)}

    def _send(self, feed: _Feed, bucket: list[tuple[str, Tensor]], policy_version: int) -> None:
        blobs = {
            rank: serialize_bucket(bucket, feed.replica.kind)
            for rank, owner in enumerate(feed.ranks)
            if owner == self.rank
        }
        if feed.group is not None:
            gathered: list | None = [None] * dist.get_world_size(feed.group) if feed.lead == self.rank else None
            dist.gather_object(blobs, gathered, dst=feed.lead, group=feed.group)
            blobs = {rank: blob for part in gathered or [] for rank, blob in part.items()}
        if feed.lead == self.rank:
            # Cached prefixes were computed with the old weights. SGLang's /flush_cache would collect garbage besides,
            # up to a second of every step on a CPU.
            self.clients[feed.replica.url].update_weights(
                [blobs[rank] for rank in range(feed.replica.tp_size)], flush_cache=True, policy_version=policy_version
            )
        if feed.group is not None:
            # The bucket's memory must live until every engine rank has copied it.
            dist.barrier(feed.group)

    def _verify(self, feed: _Feed, expected: ExpectedChecksums, policy_version: int) -> None:
        wrong = checksum_differences(expected.result(), self.clients[feed.replica.url].checksums())
        if wrong:
            raise WeightSyncError(
                f"{feed.replica.url} does not serve policy version {policy_version}: {len(wrong)} tensors differ "
                f"from the trainer's. " + "; ".join(wrong[:5])
            )
