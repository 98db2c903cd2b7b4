"""`WeightSync`: a trainer rank's part in the hand-over: it sends servers the weights, and proves that they arrived.

`WeightSource` has the calls of the driver to it. A driver imports this module, so megatron is imported by methods.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from scalerl.cluster.dispatch import Dispatch, Worker, register
from scalerl.errors import RunError
from scalerl.rollout.servers.checksums import checksum_differences
from scalerl.rollout.servers.client import ClientSettings, Replica, RolloutClient
from scalerl.rollout.servers.purpose import POLICY
from scalerl.rollout.sync.handover import (
    DeviceMemory,
    Part,
    Point,
    agreed_bucket_bytes,
    check_room_together,
    free_for_buckets,
    hashed_expert_bytes,
    measure,
)
from scalerl.rollout.sync.quantized import quantized_export, quantized_layout
from scalerl.rollout.sync.session import (
    Export,
    Feed,
    RankReport,
    Step,
    SyncOrder,
    SyncSession,
    Transport,
    feeds_of,
    join_feeds,
    plan_feeds,
)

if TYPE_CHECKING:
    from scalerl.config.servers import TransportName
    from scalerl.models.adapters import Adapter
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.tracking.metrics import Metric

# The steps by which a part of a server's device memory leaves and comes back.
RELEASE: dict[Part, Step] = {"kv_cache": "release_kv", "weights": "release_weights"}
RESUME: dict[Part, Step] = {"kv_cache": "resume_kv", "weights": "resume_weights"}


class WeightSyncError(RunError):
    """Raised when a server does not serve the trainer's weights."""


class WeightSync:
    """A trainer rank's part in the hand-over with the servers; built once per run.

    `sync`, `release` and `resume_caches` are collective over the trainer's world. Each server is asked by one rank, its
    lead, which takes the server's order and hands it back in the report.
    """

    def __init__(
        self,
        engine: MegatronEngine,
        replicas: Sequence[Replica],
        model_config: Mapping[str, Any],
        *,
        bucket_bytes: int,
        timeout_s: float,
        dtype: torch.dtype | None = None,
        transport: TransportName = "shared",
        directory: str | None = None,
        model_path: str | None = None,
        memory: DeviceMemory | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """Connects to the servers that this rank leads; collective.

        model_config: the model's config.json, which tells how a server cuts and fuses the tensors it checks.
        timeout_s: of a request to a server, and of a broadcast.
        dtype: the dtype that the servers store; None: the engine's.
        directory, model_path: of transport disk: where the weights go, where the rest of the model is.
        memory: of the device that this rank shares with servers; None: the servers have devices to themselves.
        adapter: the one that servers take, beside the model of its files; None: they take all weights.
        """
        self.engine, self.model_config, self.bucket_bytes = engine, model_config, bucket_bytes
        self.rank, self.dtype, self.memory = dist.get_rank(), dtype, memory
        self.timeout_s = timeout_s
        self.feeds = join_feeds(feeds_of(transport, replicas, dist.get_world_size()))
        # Indices of the servers on this rank's device.
        self.on_device = [
            i for i, ranks in enumerate(plan_feeds(replicas, dist.get_world_size())) if self.rank in ranks
        ]
        self.clients = {feed.replica.url: self._client(feed) for feed in self.feeds if feed.lead == self.rank}
        self.transport = make_transport(
            transport,
            engine,
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            directory=directory,
            model_path=model_path,
            quantizes=any(replica.quantization for replica in replicas),
            adapter=adapter,
            dtype=dtype,
        )

    def _client(self, feed: Feed) -> RolloutClient:
        # It asks for no samples.
        return ClientSettings(POLICY, max_model_len=1, timeout_s=self.timeout_s, max_concurrency=1).client(feed.replica)

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

    def _session(self, orders: Mapping[int, SyncOrder] | None, **options: Any) -> SyncSession:
        feeds = [feed for feed in self.feeds if orders is None or feed.index in orders]
        return SyncSession(feeds, self.clients, rank=self.rank, orders=orders, **options)

    # --- weights ---

    def sync(
        self,
        policy_version: int,
        *,
        verify: bool,
        orders: Mapping[int, SyncOrder] | None = None,
        weights_on_device: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> RankReport:
        """Gives servers the engine's weights, with which they sample as policy_version from then on.

        orders: as `SyncSession`, of the replicas that take part; None: all take part.
        weights_on_device: keeps the engine's parameters on this rank's device inside its block.

        Raises WeightSyncError naming tensors that differ (verify=True), HandoverError where memory does not suffice. A
        server that fails is in the report; the others have the weights then.
        """
        session = self._session(orders, policy_version=policy_version, verify=verify)
        self._check_memory("before_sync", session, "weights")
        self._resume("weights", session)
        with weights_on_device():
            self._send(session)
            if verify:
                self._verify(session)
            dist.barrier()
        self._check_memory("after_sync", session, "kv_cache")
        self._resume("kv_cache", session)
        return self._report(session)

    def _send(self, session: SyncSession) -> None:
        with _timed(session, "send"):
            session.expected = {
                feed.index: feed.replica.expected_checksums(self.model_config, self.dtype, ranks)
                for feed in session.feeds
                if session.verify and (ranks := feed.engine_ranks(self.rank))
            }
            session.bucket_bytes = self._agree_on_buckets(verify=session.verify)
            session.call_all("begin", self._begin)
            num_bytes, num_buckets = self.transport.send(session)
            session.call_all("end", lambda client: client.end_weight_update(session.policy_version))
        report = session.report
        report.num_bytes, report.num_buckets, report.bucket_bytes = num_bytes, num_buckets, session.bucket_bytes

    def _begin(self, client: RolloutClient) -> None:
        if self.transport.has_session:
            client.begin_weight_update()

    def _agree_on_buckets(self, *, verify: bool) -> int:
        """The bucket size of this sync: self.bucket_bytes, or less where free memory is short; collective."""
        from scalerl.parallel.export import largest_bytes

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
        )

    def _verify(self, session: SyncSession) -> None:
        """Compares the checksums of the servers' tensors with those of the trainer's; collective over each feed."""
        with _timed(session, "verify"):
            expected = {}
            for feed in session.feeds:
                if self.rank in feed.ranks:
                    expected[feed.index] = feed.gather(session.expected[feed.index].by_rank())
            for feed in session.led_feeds:
                self._compare(session, feed, expected[feed.index])

    def _compare(self, session: SyncSession, feed: Feed, expected: Mapping[int, dict[str, str]]) -> None:
        served = session.call(feed, "check", RolloutClient.checksums)
        if served is None:
            return
        wrong = checksum_differences([expected[rank] for rank in sorted(expected)], served)
        if wrong:
            raise WeightSyncError(
                f"{feed.replica.url} does not serve policy version {session.policy_version}: {len(wrong)} tensors "
                "differ from the trainer's. " + "; ".join(wrong[:5])
            )

    # --- memory ---

    def release(self, points: Mapping[Part, Point], orders: Mapping[int, SyncOrder]) -> RankReport:
        """Has servers give up parts of their device memory, one after the other, and waits until it is free.

        points: part -> where memory is measured after its release. The report says what the device then lacks.
        """
        memory, session = self._memory, self._session(orders)
        measured = memory.record("before_release")
        for part, point in points.items():
            with _timed(session, RELEASE[part]):
                session.call_all(RELEASE[part], partial(_release, part=part))
                dist.barrier()
            measured = memory.record_released(part, point, measured)
            session.report.lack = memory.lack(point, measured)
        return self._report(session)

    def resume_caches(self, orders: Mapping[int, SyncOrder]) -> RankReport:
        """Has servers take back their KV caches after a save or a load. Raises HandoverError."""
        session = self._session(orders)
        self._check_memory("after_save", session, "kv_cache")
        self._resume("kv_cache", session)
        return self._report(session)

    @property
    def _memory(self) -> DeviceMemory:
        assert self.memory is not None, "the servers have devices to themselves"
        return self.memory

    def _check_memory(self, point: Point, session: SyncSession, returning: Part) -> None:
        """Collective: measures, and raises HandoverError on every rank where a device lacks memory for what follows.

        returning: the part that servers take back next, those that released it.
        """
        if self.memory is None:
            return
        comes_back = any(index in self.on_device for index in session.without(returning))
        measured = self.memory.record(point)
        check_room_together(self.memory.lack(point, measured, [returning] if comes_back else []))

    def _resume(self, part: Part, session: SyncSession) -> None:
        """Has the servers that released this part take it back."""
        if indices := session.without(part):
            with _timed(session, RESUME[part]):
                session.call_all(RESUME[part], partial(_resume, part=part), indices)
                dist.barrier()

    def _report(self, session: SyncSession) -> RankReport:
        if self.memory is not None:
            session.report.metrics |= self.memory.metrics()
        return session.report


def _release(client: RolloutClient, part: Part) -> None:
    client.release(client.engine.memory_tags[part])


def _resume(client: RolloutClient, part: Part) -> None:
    client.resume(client.engine.memory_tags[part])


@contextmanager
def _timed(session: SyncSession, name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    session.report.seconds[name] = time.perf_counter() - began


def make_transport(
    name: TransportName,
    engine: MegatronEngine,
    *,
    bucket_bytes: int,
    timeout_s: float,
    directory: str | None = None,
    model_path: str | None = None,
    quantizes: bool = False,
    adapter: Adapter | None = None,
    dtype: torch.dtype | None = None,
) -> Transport:
    """Makes the transport of that name; collective over the trainer's world.

    directory, model_path: as `DiskTransport`, which alone needs them.  quantizes: the servers compute in fp8.
    adapter, dtype: as `AdapterTransport`; None: servers take all weights.
    """
    if adapter is not None:
        from scalerl.rollout.sync.transports.adapter import AdapterTransport

        return AdapterTransport(engine, adapter, dtype=dtype, by_value=name != "shared")
    export: Export = quantized_export(engine.export_buckets) if quantizes else engine.export_buckets
    if name == "disk":
        from scalerl.parallel.export import BucketWriter
        from scalerl.rollout.sync.transports.disk import DiskTransport

        assert directory is not None and model_path is not None

        def layout(size: int) -> list:
            return BucketWriter(engine.chunks, engine.family, engine.shape, engine.groups, bucket_bytes=size).tensors

        written = quantized_layout(layout) if quantizes else layout
        return DiskTransport(export, written, directory=directory, model_path=model_path)
    if name == "broadcast":
        from scalerl.rollout.sync.transports.broadcast import BroadcastTransport

        backend = "nccl" if next(engine.chunks[0].parameters()).is_cuda else "gloo"
        return BroadcastTransport(export, backend=backend, timeout_s=timeout_s)
    from scalerl.rollout.sync.transports.memory import GatheredTransport, SharedTransport

    # Blocks span what several ranks hold, so a rank quantizes whole tensors.
    if not quantizes and SharedTransport.possible(engine):
        return SharedTransport(engine, bucket_bytes)
    return GatheredTransport(export)


class WeightSource(Worker):
    """A rank with the policy's weights; the trainer's worker says how its engine takes part in a sync."""

    # Role -> engine, `actor` among them.
    engines: Mapping[str, MegatronEngine]
    # cuda or cpu.
    device: str
    _weight_sync: WeightSync | None = None

    @property
    def weight_sync(self) -> WeightSync:
        assert self._weight_sync is not None, "no servers are connected"
        return self._weight_sync

    @register(Dispatch.ONE_TO_ALL)
    def connect_rollout(
        self,
        replicas: Sequence[Replica],
        model_config: Mapping[str, Any],
        *,
        bucket_bytes: int,
        timeout_s: float,
        dtype: str | None = None,
        transport: TransportName = "shared",
        directory: str | None = None,
        model_path: str | None = None,
        shares_devices: bool = True,
        hands_over: bool = False,
        keep_less: str | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """Connects this rank to the servers (`WeightSync`).

        dtype: the dtype that the servers store; None: the engine's.  shares_devices: with the servers.
        adapter: as `WeightSync`.  hands_over, keep_less: as `DeviceMemory`.
        """
        memory = DeviceMemory(
            lambda: measure(self.rank, self.device, self.engines), hands_over=hands_over, keep_less=keep_less
        )
        self._weight_sync = WeightSync(
            self.engines["actor"],
            replicas,
            model_config,
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            dtype=getattr(torch, dtype) if dtype else None,
            transport=transport,
            directory=directory,
            model_path=model_path,
            memory=memory if shares_devices else None,
            adapter=adapter,
        )

    @register(Dispatch.ONE_TO_ALL)
    def reconnect_rollout(self, successors: Mapping[int, Replica]) -> None:
        """Connects this rank to restarted servers.  successors: index -> the restarted server."""
        self.weight_sync.reconnect(successors)

    @register(Dispatch.ONE_TO_ALL)
    def sync_weights(
        self,
        policy_version: int,
        *,
        verify: bool,
        orders: Mapping[int, SyncOrder] | None = None,
        with_memory: bool = False,
    ) -> RankReport:
        """Sends this rank's weights to the servers by `WeightSync.sync`.

        with_memory: the report also has the metrics of `memory`.
        """
        report = self.weight_sync.sync(
            policy_version, verify=verify, orders=orders, weights_on_device=self.weights_on_device
        )
        if with_memory:
            report.metrics |= self.memory()
        return report

    @register(Dispatch.ONE_TO_ALL)
    def release_servers(self, points: Mapping[Part, Point], orders: Mapping[int, SyncOrder]) -> RankReport:
        """Has the servers give up parts of their device memory, as `WeightSync.release`."""
        return self.weight_sync.release(points, orders)

    @register(Dispatch.ONE_TO_ALL)
    def resume_caches(self, orders: Mapping[int, SyncOrder]) -> RankReport:
        """Has the servers take back their KV caches, as `WeightSync.resume_caches`."""
        return self.weight_sync.resume_caches(orders)

    def weights_on_device(self) -> AbstractContextManager[None]:
        """Keeps the actor's parameters on this rank's device inside the block."""
        raise NotImplementedError

    @register(Dispatch.ONE_TO_ALL)
    def memory(self) -> dict[str, Metric]:
        """Memory metrics of this rank since the last call."""
        raise NotImplementedError
