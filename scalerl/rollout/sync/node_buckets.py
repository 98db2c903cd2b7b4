"""`NodeBuckets`: buckets of weights in memory that all trainer ranks of one machine share; on a CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scalerl.parallel.engine import MegatronEngine
from scalerl.parallel.export import BucketWriter
from scalerl.parallel.offload import PARAMS
from scalerl.rollout.servers.mapped import BucketPlace, MappedBytes
from scalerl.rollout.servers.weights import Bucket, flat_layout


class NodeBuckets:
    """Memory of one machine into which every rank copies the weights it holds, so that each byte is copied once.

    It has room for two buckets: servers read one while the ranks write the other. It is kept from sync to sync.
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

    def __len__(self) -> int:
        return len(self.entries)

    @contextlib.contextmanager
    def room(self, bucket_bytes: int | None = None) -> Iterator[None]:
        """Collective: the memory that `write` needs exists inside the block.

        bucket_bytes: the same on all ranks; None: as before.
        """
        self.engine.require_on_device(PARAMS, work="the export of weights", reads=True)
        if bucket_bytes not in (None, self.bucket_bytes):
            self._plan(bucket_bytes)
        num_bytes = self.largest * min(2, len(self))
        if self.memory is None or self.memory.flat.numel() != num_bytes:
            # The old memory is freed before the new is allocated.
            self.memory = None
            self.memory = _mapped_by_all(num_bytes)
        yield

    def write(self, number: int) -> Bucket:
        """Writes this rank's part of a bucket, over the bucket before the last; whole once every rank has written."""
        assert self.memory is not None, "write outside of room()"
        offset = number % 2 * self.largest
        named = self.memory.views(self.entries[number], offset)
        self.writer.write(number, dict(named))
        return Bucket(named, BucketPlace(self.memory, offset, self.entries[number]))


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
