"""Weights through memory: `SharedTransport` on one machine (CPUs), `GatheredTransport` on each device (GPUs)."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scalerl.parallel.engine import MegatronEngine
from scalerl.parallel.export import BucketWriter
from scalerl.parallel.offload import PARAMS
from scalerl.rollout.servers.buckets import Bucket, BucketPlace, MappedBytes, flat_layout
from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.sync.session import Export, Feed, SyncSession, Transport, wait_all


class GatheredTransport(Transport):
    """Weights by the memory of each device: on GPUs (CUDA IPC), and where trainer ranks are on several machines.

    While servers load one bucket the next one is gathered.
    """

    def __init__(self, export: Export) -> None:
        self.export = export

    def send(self, session: SyncSession) -> tuple[int, int]:
        num_bytes = num_buckets = 0
        mine = [feed for feed in session.feeds if session.rank in feed.ranks]
        feeding = {rank for feed in session.feeds for rank in feed.ranks}
        sending: list[Future] = []
        # One thread: the ranks of a feed meet in it in the order of the buckets.
        with ThreadPoolExecutor(1) as thread:
            for named in self.export(session.bucket_bytes, lambda number: feeding):
                # What servers load is a copy, which is gone before that of this bucket is made.
                wait_all(sending)
                bucket = Bucket(named)
                num_bytes, num_buckets = num_bytes + bucket.num_bytes, num_buckets + 1
                parts = [(feed, serialized(bucket, feed, session.rank)) for feed in mine]
                sending = [thread.submit(self._send, session, *part) for part in parts]
                session.hash(named)
            wait_all(sending)
        return num_bytes, num_buckets

    def _send(self, session: SyncSession, feed: Feed, blobs: dict[int, str]) -> None:
        """Sends one bucket to one server; collective over the feed's ranks.  blobs: of this rank, by engine rank."""
        blobs = feed.gather(blobs)
        if feed.lead == session.rank:
            load_blobs(session, feed, [blobs[rank] for rank in range(feed.replica.tp_size)])
        # The bucket's memory must live until every engine rank has copied it.
        feed.wait()


def serialized(bucket: Bucket, feed: Feed, rank: int) -> dict[int, str]:
    """Serializes the bucket for each engine rank that this rank feeds."""
    engine = ENGINES[feed.replica.engine]
    return {number: engine.serialize(bucket) for number in feed.engine_ranks(rank)}


class SharedTransport(Transport):
    """Weights by memory of one machine: each byte is copied twice, by trainer and server, whatever the layout.

    Every rank copies the weights that it holds into the memory, which has room for two buckets: servers read one while
    the ranks write the other. It is kept from sync to sync.
    """

    def __init__(self, engine: MegatronEngine, bucket_bytes: int) -> None:
        self.engine = engine
        self.memory: MappedBytes | None = None
        self._plan(bucket_bytes)

    def _plan(self, bucket_bytes: int) -> None:
        engine, self.bucket_bytes = self.engine, bucket_bytes
        self.writer = BucketWriter(engine.chunks, engine.family, engine.shape, engine.groups, bucket_bytes=bucket_bytes)
        layouts = [flat_layout(tensors) for tensors in self.writer.tensors]
        self.entries = [entries for entries, _ in layouts]
        self.largest = max(num_bytes for _, num_bytes in layouts)

    @staticmethod
    def possible(engine: MegatronEngine) -> bool:
        """Collective: whether all ranks compute on CPUs and find each other's memory."""
        on_cpu = next(engine.chunks[0].parameters()).device.type == "cpu"
        by_rank: list = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, (on_cpu, _process_numbers()))
        return on_cpu and by_rank[0][1] is not None and len(set(by_rank)) == 1

    def send(self, session: SyncSession) -> tuple[int, int]:
        """Sends all buckets: while the ranks write one, servers load and leads hash the one before."""
        num_bytes = 0
        pending: list[Future] = []
        self.make_room(session.bucket_bytes)
        with ThreadPoolExecutor(max(1, len(session.led_feeds) + len(session.expected))) as threads:
            for number in range(self.num_buckets):
                bucket = self.write(number)
                num_bytes += bucket.num_bytes
                wait_all(pending)
                # Now this bucket is whole, and nobody reads from where the next one goes.
                dist.barrier()
                pending = [threads.submit(load_bucket, session, feed, bucket) for feed in session.led_feeds]
                pending += [threads.submit(checksums.add, bucket.named) for checksums in session.expected.values()]
            wait_all(pending)
        return num_bytes, self.num_buckets

    @property
    def num_buckets(self) -> int:
        return len(self.entries)

    def make_room(self, bucket_bytes: int) -> None:
        """Collective: makes the memory that `write` needs.  bucket_bytes: the same on all ranks."""
        self.engine.require_on_device(PARAMS, work="the export of weights", reads=True)
        if bucket_bytes != self.bucket_bytes:
            self._plan(bucket_bytes)
        num_bytes = self.largest * min(2, self.num_buckets)
        if self.memory is None or self.memory.flat.numel() != num_bytes:
            # The old memory is freed before the new is allocated.
            self.memory = None
            self.memory = _mapped_by_all(num_bytes)

    def write(self, number: int) -> Bucket:
        """Writes this rank's part of a bucket, over the bucket before the last; whole once every rank has written."""
        assert self.memory is not None, "no room was made"
        offset = number % 2 * self.largest
        named = self.memory.views(self.entries[number], offset)
        self.writer.write(number, dict(named))
        return Bucket(named, BucketPlace(self.memory, offset, self.entries[number]))


def load_bucket(session: SyncSession, feed: Feed, bucket: Bucket) -> None:
    engine = ENGINES[feed.replica.engine]
    blobs = [engine.serialize(bucket) for _ in range(feed.replica.tp_size)]
    load_blobs(session, feed, blobs, is_mapped=bucket.is_mapped)


def load_blobs(session: SyncSession, feed: Feed, blobs: list[str], *, is_mapped: bool = False) -> None:
    """Has one server load a bucket. blobs: one per engine rank.  is_mapped: as `Bucket.is_mapped`."""
    session.call(
        feed,
        "bucket",
        lambda client: client.update_weights(blobs, policy_version=session.policy_version, is_mapped=is_mapped),
    )


def _process_numbers() -> tuple[str, int] | None:
    """Numbers that are equal in two processes exactly when each can address the other by process id.

    They stand for the boot and the PID namespace. None where that cannot be read (no Linux).
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return boot, os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def _mapped_by_all(num_bytes: int) -> MappedBytes:
    """Collective: allocates the memory on rank 0; the other ranks attach to it."""
    memory: MappedBytes | None = None
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            memory = MappedBytes.allocate(num_bytes)
        except Exception as raised:
            error = raised
    message: list[Any] = [(error, memory and memory.path)]
    dist.broadcast_object_list(message, src=0)
    error, path = message[0]
    if error is not None:
        raise error
    return memory or MappedBytes.attach(path, num_bytes)
