"""How weights reach the rollout servers: `actor_rollout_ref.rollout.weight_transport`."""

from __future__ import annotations

from typing import Literal, cast

from scalerl.config.schema import PPOConfig

TransportName = Literal["shared", "broadcast", "disk"]


def transport_of(cfg: PPOConfig) -> TransportName:
    """The weight transport of a run, with auto replaced by what it stands for."""
    transport = cfg.actor_rollout_ref.rollout.weight_transport
    if transport != "auto":
        return cast("TransportName", transport)
    return "shared" if cfg.actor_rollout_ref.hybrid_engine else "broadcast"
