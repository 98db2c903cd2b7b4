"""`Replica`: where a server answers; `ClientSettings`: what makes a client of it, in any process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scalerl.servers.purpose import Purpose

if TYPE_CHECKING:
    from scalerl.servers.client import RolloutClient


@dataclass(frozen=True)
class Replica:
    """One rollout server. engine: its name (`engines.ENGINES`).

    tp_size: its ranks; each takes its own copy of a bucket.  key: what its clients must have.
    """

    url: str
    engine: str
    tp_size: int
    key: str = field(repr=False)


@dataclass(frozen=True)
class ClientSettings:
    """What the clients of a set have in common, whichever process they are in. max_concurrency: samples in flight."""

    purpose: Purpose
    max_model_len: int
    timeout_s: float
    max_concurrency: int = 256

    def client(self, replica: Replica) -> RolloutClient:
        from scalerl.servers.client import RolloutClient

        return RolloutClient(
            replica.url,
            replica.engine,
            key=replica.key,
            max_model_len=self.max_model_len,
            timeout_s=self.timeout_s,
            max_concurrency=self.max_concurrency,
            purpose=self.purpose,
        )
