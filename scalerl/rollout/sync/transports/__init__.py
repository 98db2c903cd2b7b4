"""`Transport`: the interface of the ways in which weights get from trainer ranks to rollout servers.

disk: through files. broadcast: over the network. shared: through the memory of the devices, or of one machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from scalerl.config.weight_transport import TransportName
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.rollout.sync.session import SyncSession


class Transport(Protocol):
    """A way for weights to get from trainer ranks to rollout servers; all ranks make it together."""

    # Whether servers take weights between begin_weight_update and end_weight_update.
    has_session: bool

    def send(self, session: SyncSession) -> tuple[int, int]:
        """Sends the weights to all servers of a session; collective over the trainer's world.

        Returns how many bytes of one copy of the model this rank had, and in how many buckets. A rank on which no
        server depends has none, or those that it writes.

        A server that fails is noted in `session`; the others get everything.
        """
        ...

    def forget(self, index: int) -> None:
        """Frees what the transport holds for the server of a replica, which is lost."""
        ...


def make_transport(
    name: TransportName,
    engine: MegatronEngine,
    *,
    bucket_bytes: int,
    timeout_s: float,
    directory: str | None = None,
    model_path: str | None = None,
) -> Transport:
    """Makes the transport of that name; collective over the trainer's world.

    directory, model_path: as `DiskTransport`, which alone needs them.
    """
    if name == "disk":
        from scalerl.parallel.export import BucketWriter
        from scalerl.rollout.sync.transports.disk import DiskTransport

        assert directory is not None and model_path is not None

        def layout(size: int) -> list:
            return BucketWriter(engine.chunks, engine.family, engine.shape, engine.groups, bucket_bytes=size).tensors

        return DiskTransport(engine.export_buckets, layout, directory=directory, model_path=model_path)
    if name == "broadcast":
        from scalerl.rollout.sync.transports.broadcast import BroadcastTransport

        backend = "nccl" if next(engine.chunks[0].parameters()).is_cuda else "gloo"
        return BroadcastTransport(engine.export_buckets, backend=backend, timeout_s=timeout_s)
    from scalerl.rollout.sync.transports.memory import GatheredTransport, NodeBuckets, SharedTransport

    if NodeBuckets.possible(engine):
        return SharedTransport(NodeBuckets(engine, bucket_bytes))
    return GatheredTransport(engine.export_buckets)
