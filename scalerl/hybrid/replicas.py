"""Which rollout servers there are, and which trainer ranks feed which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Replica:
    """One rollout server. kind: `sglang` | `embedded`.  tp_size: its ranks; each takes its own copy of a bucket."""

    url: str
    kind: str
    tp_size: int


def plan_feeds(replicas: Sequence[Replica], world_size: int) -> list[tuple[int, ...]]:
    """Per replica, the trainer rank that makes the bucket of each of its engine ranks; the first talks to the server.

    Engine ranks, counted over all replicas, are fed by the trainer rank with the same number (modulo the world). On a
    GPU that rank sits on the engine rank's device, so its bucket crosses by CUDA IPC.
    """
    feeds, first = [], 0
    for replica in replicas:
        feeds.append(tuple((first + rank) % world_size for rank in range(replica.tp_size)))
        first += replica.tp_size
    return feeds
