"""Buckets of weights in memory that every trainer rank of one machine sees; on a CPU."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import torch.distributed as dist

from scalerl.parallel.engine import MegatronEngine
from scalerl.parallel.export import BucketWriter
from scalerl.parallel.offload import PARAMS
from scalerl.rollout.weights import SHARED_MEMORY_DIR, Bucket, SharedBytes, flat_layout


class NodeBuckets:
    """Every rank copies what it holds into its place, so that a byte is copied once until a server reads it.

    There is room for two buckets: while servers read the one, the ranks write the other. It is there during a sync
    only: shared memory has a file name, and what a killed run has of it stays until the machine is restarted.
    """

    def __init__(self, engine: MegatronEngine, bucket_bytes: int) -> None:
        self.engine = engine
        self.writer = BucketWriter(engine.chunks, engine.family, engine.shape, engine.groups, bucket_bytes=bucket_bytes)
        layouts = [flat_layout(tensors) for tensors in self.writer.tensors]
        self.entries = [entries for entries, _ in layouts]
        self.largest = max(num_bytes for _, num_bytes in layouts)
        self.memory: list[SharedBytes] = []

    @staticmethod
    def possible(engine: MegatronEngine) -> bool:
        """Collective: whether all ranks compute on CPUs and see one shared memory."""
        on_cpu = next(engine.chunks[0].parameters()).device.type == "cpu"
        found = os.stat(SHARED_MEMORY_DIR) if os.path.isdir(SHARED_MEMORY_DIR) else None
        place = (on_cpu, socket.gethostname(), found and (found.st_dev, found.st_ino))
        places: list = [None] * dist.get_world_size()
        dist.all_gather_object(places, place)
        return on_cpu and found is not None and len(set(places)) == 1

    def __len__(self) -> int:
        return len(self.entries)

    @contextlib.contextmanager
    def room(self) -> Iterator[None]:
        """Collective: the memory that `write` writes into. Raises UserError where the machine has too little of it."""
        self.engine.require_on_device(PARAMS, work="the export of weights")
        self.memory = [_shared_by_all(self.largest) for _ in range(min(2, len(self)))]
        try:
            yield
        finally:
            self.memory = []

    def write(self, number: int) -> Bucket:
        """This rank's part of that bucket; whole once every rank has done it. Overwrites the bucket before the last."""
        memory = self.memory[number % 2]
        named = memory.views(self.entries[number])
        self.writer.write(number, dict(named))
        return Bucket(named, memory, self.entries[number])


def _shared_by_all(num_bytes: int) -> SharedBytes:
    """Collective: rank 0 allocates, the others attach."""
    others = range(1, dist.get_world_size())
    memory, error = None, None
    if dist.get_rank() == 0:
        try:
            memory = SharedBytes.allocate(num_bytes)
        except Exception as raised:
            error = raised
    handles = [None] * dist.get_world_size()
    if memory is not None:
        handles = [None, *(memory.handle() for _ in others)]
    message = [(error, handles)]
    dist.broadcast_object_list(message, src=0)
    error, handles = message[0]
    if error is not None:
        raise error
    return memory or SharedBytes.attach(handles[dist.get_rank()])
