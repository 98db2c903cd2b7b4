"""The way that weights take to the servers: `actor_rollout_ref.rollout.weight_transport`."""

from __future__ import annotations

from typing import Literal, cast

from scalerl.config.schema import PPOConfig

TransportName = Literal["shared", "broadcast", "disk"]


def transport_of(cfg: PPOConfig) -> TransportName:
    """weight_transport with auto filled in."""
    transport = cfg.actor_rollout_ref.rollout.weight_transport
    if transport != "auto":
        return cast("TransportName", transport)
    return "shared" if cfg.actor_rollout_ref.hybrid_engine else "broadcast"
