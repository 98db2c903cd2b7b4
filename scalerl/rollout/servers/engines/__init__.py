"""The engines that a rollout server can run, one file each.

Processes that must start quickly use them, so torch is imported inside their methods.
"""

from __future__ import annotations

from importlib import import_module

from scalerl.config.servers import ROLLOUT_ENGINES
from scalerl.rollout.servers.engines.base import Command, Engine, Launch

__all__ = ["ENGINES", "Command", "Engine", "Launch"]

ENGINES: dict[str, Engine] = {name: import_module(f"{__name__}.{name}").ENGINE for name in ROLLOUT_ENGINES}
