"""The ways that weights take from the trainer ranks to the rollout servers, behind one interface."""

from __future__ import annotations

from typing import Protocol

from scalerl.config.weight_transport import TransportName
from scalerl.hybrid.delivery import Delivery

__all__ = ["Transport", "TransportName"]


class Transport(Protocol):
    """Made by all trainer ranks together."""

    # Whether servers take weights between begin_weight_update and end_weight_update.
    has_session: bool

    def send(self, delivery: Delivery) -> tuple[int, int]:
        """Collective over the trainer's world. -> bytes that this rank has of one copy of the model, and its buckets.

        A rank on which no server depends has none of them, or those that it writes.

        A server that fails is noted in `delivery`; the others get everything.
        """
        ...

    def forget(self, index: int) -> None:
        """The server of that replica is gone; what was set up with it is given back."""
        ...
