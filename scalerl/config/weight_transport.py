"""How weights reach the rollout servers: `actor_rollout_ref.rollout.weight_transport`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, cast

from scalerl.config.schema import PPOConfig

TransportName = Literal["shared", "broadcast", "disk"]


def transport_of(cfg: PPOConfig) -> TransportName:
    """The weight transport of a run, with auto replaced by what it stands for."""
    transport = cfg.actor_rollout_ref.rollout.weight_transport
    if transport != "auto":
        return cast("TransportName", transport)
    return "shared" if cfg.actor_rollout_ref.hybrid_engine else "broadcast"


def weight_directory(shared: str | Path, run_dir: str | Path) -> Path:
    """The directory, below a shared one, for weights of the run that writes run_dir; a resumed run has the same."""
    run = Path(run_dir).absolute()
    return Path(shared).expanduser().absolute() / f"{run.name}-{hashlib.sha256(str(run).encode()).hexdigest()[:12]}"
