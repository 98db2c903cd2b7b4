"""Recording of metrics: `Tracking` logs to backends, classes that are registered by name (docs/tracking.md)."""

from __future__ import annotations

# These imports register the backends, in the order in which an error lists them.
from scalerl.tracking import (  # noqa: F401
    console,
    jsonl,
    mlflow_backend,
    swanlab_backend,
    tensorboard_backend,
    wandb_backend,
)
from scalerl.tracking.backend import (
    Backend,
    RunInfo,
    backend_names,
    check_backends,
    register_backend,
    unregister_backend,
)
from scalerl.tracking.tracker import Tracking

__all__ = [
    "Backend",
    "RunInfo",
    "Tracking",
    "backend_names",
    "check_backends",
    "register_backend",
    "unregister_backend",
]
