"""`make_transport`: makes a transport by its name."""

from __future__ import annotations

from scalerl.parallel.engine import MegatronEngine
from scalerl.parallel.export import BucketWriter
from scalerl.rollout.sync.feed_groups import FeedGroups
from scalerl.rollout.sync.node_buckets import NodeBuckets
from scalerl.rollout.sync.transports import Transport, TransportName
from scalerl.rollout.sync.transports.broadcast import BroadcastTransport
from scalerl.rollout.sync.transports.disk import DiskTransport
from scalerl.rollout.sync.transports.gathered import GatheredTransport
from scalerl.rollout.sync.transports.shared import SharedTransport


def make_transport(
    name: TransportName,
    engine: MegatronEngine,
    groups: FeedGroups,
    *,
    bucket_bytes: int,
    timeout_s: float,
    directory: str | None = None,
    model_path: str | None = None,
) -> Transport:
    """Makes the transport of that name; collective over the trainer's world.

    groups: of the feeds.  directory, model_path: as `DiskTransport`, which alone needs them.
    """
    if name == "disk":
        assert directory is not None and model_path is not None

        def layout(size: int) -> list:
            return BucketWriter(engine.chunks, engine.family, engine.shape, engine.groups, bucket_bytes=size).tensors

        return DiskTransport(engine.export_buckets, layout, directory=directory, model_path=model_path)
    if name == "broadcast":
        backend = "nccl" if next(engine.chunks[0].parameters()).is_cuda else "gloo"
        return BroadcastTransport(engine.export_buckets, backend=backend, timeout_s=timeout_s)
    if NodeBuckets.possible(engine):
        return SharedTransport(NodeBuckets(engine, bucket_bytes))
    return GatheredTransport(engine.export_buckets, groups)
