"""The engines that a rollout server may run; one file each.

They are made from configurations and used by processes that must start quickly: torch is imported inside their methods.
"""

from __future__ import annotations

from scalerl.servers.engines.base import Command, Engine, Launch
from scalerl.servers.engines.embedded import EmbeddedEngine
from scalerl.servers.engines.sglang import SGLangEngine

__all__ = ["ENGINES", "Command", "Engine", "Launch"]

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (SGLangEngine(), EmbeddedEngine())}
