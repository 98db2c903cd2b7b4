"""`Feed`: which trainer ranks send weights to which rollout server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scalerl.rollout.servers.replica import Replica


@dataclass(frozen=True)
class Feed:
    """The trainer ranks that feed one replica; ranks[0] talks to its server. index: of the replica."""

    index: int
    replica: Replica
    ranks: tuple[int, ...]

    @property
    def lead(self) -> int:
        return self.ranks[0]

    def engine_ranks(self, rank: int) -> list[int]:
        """The ranks of the server that a trainer rank feeds, and whose checksums it makes."""
        return [number for number in range(self.replica.tp_size) if self.ranks[number % len(self.ranks)] == rank]


def plan_feeds(replicas: Sequence[Replica], world_size: int) -> list[tuple[int, ...]]:
    """The trainer ranks that make the buckets of each replica's engine ranks; the first talks to the server.

    Engine ranks, counted over all replicas, are fed by the trainer rank with the same number (modulo the world). On a
    GPU that rank sits on the engine rank's device, so its bucket crosses by CUDA IPC.
    """
    feeds, first = [], 0
    for replica in replicas:
        feeds.append(tuple((first + rank) % world_size for rank in range(replica.tp_size)))
        first += replica.tp_size
    return feeds


def plan_leads(num_replicas: int, world_size: int) -> list[int]:
    """The one trainer rank that sends to each replica; these are spread over nodes and data-parallel copies."""
    if num_replicas <= world_size:
        return [index * world_size // num_replicas for index in range(num_replicas)]
    return [index % world_size for index in range(num_replicas)]


def feeds_of(transport: str, replicas: Sequence[Replica], world_size: int) -> list[Feed]:
    """The Feed of each replica. With transport `shared` the ranks on its devices feed it, else one rank alone."""
    if transport == "shared":
        ranks = plan_feeds(replicas, world_size)
    else:
        ranks = [(lead,) for lead in plan_leads(len(replicas), world_size)]
    return [Feed(index, *fed) for index, fed in enumerate(zip(replicas, ranks, strict=True))]
