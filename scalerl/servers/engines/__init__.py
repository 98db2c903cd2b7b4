"""The engines that a rollout server can run, one file each.

Processes that must start quickly use them, so torch is imported inside their methods.
"""

from __future__ import annotations

from scalerl.servers.engines.base import Command, Engine, Launch
from scalerl.servers.engines.embedded import EmbeddedEngine
from scalerl.servers.engines.sglang import SGLangEngine

__all__ = ["ENGINES", "Command", "Engine", "Launch"]

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (SGLangEngine(), EmbeddedEngine())}
