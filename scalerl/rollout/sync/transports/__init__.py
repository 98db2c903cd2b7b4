"""`Transport`: the interface of the ways in which weights get from trainer ranks to rollout servers."""

from __future__ import annotations

from typing import Protocol

from scalerl.config.servers import TransportName
from scalerl.rollout.sync.delivery import Delivery

__all__ = ["Transport", "TransportName"]


class Transport(Protocol):
    """A way for weights to get from trainer ranks to rollout servers; all ranks make it together."""

    # Whether servers take weights between begin_weight_update and end_weight_update.
    has_session: bool

    def send(self, delivery: Delivery) -> tuple[int, int]:
        """Sends the weights to all servers of a delivery; collective over the trainer's world.

        Returns how many bytes of one copy of the model this rank had, and in how many buckets. A rank on which no
        server depends has none, or those that it writes.

        A server that fails is noted in `delivery`; the others get everything.
        """
        ...

    def forget(self, index: int) -> None:
        """Frees what the transport holds for the server of a replica, which is lost."""
        ...
