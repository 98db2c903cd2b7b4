"""`Replica`, the address of a server; `Purpose` of a set of servers; `ClientSettings`, which make clients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from scalerl.rollout.servers.checksums import ExpectedChecksums
    from scalerl.rollout.servers.client import RolloutClient


@dataclass(frozen=True)
class Purpose:
    """The purpose of servers.  who: their name in errors.

    section: configuration section of their `ServerConfig`; None: a command's server, which options of it configure.
    """

    who: str
    section: str | None

    def key(self, name: str) -> str:
        """What sets this field of their `ServerConfig`: a configuration key, or an option."""
        return f"--{name.replace('_', '-')}" if self.section is None else f"{self.section}.{name}"


POLICY = Purpose("rollout server", "actor_rollout_ref.rollout")
JUDGE = Purpose("judge server", "reward_model.judge")
GENERATION = Purpose("rollout server", "rollout")


@dataclass(frozen=True)
class Replica:
    """The address of a rollout server.  engine: name of its engine (`engines.ENGINES`).

    tp_size: its ranks, each of which takes a copy of each bucket.  key: the key that its clients must have.
    engine_kwargs: of its configuration.
    """

    url: str
    engine: str
    tp_size: int
    key: str = field(repr=False)
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)

    def expected_checksums(
        self,
        model_config: Mapping[str, Any],
        dtype: torch.dtype | None = None,
        ranks: Collection[int] | None = None,
    ) -> ExpectedChecksums:
        """What its server's checksums must be.  model_config: the model's config.json.  dtype, ranks: as
        `ExpectedChecksums`."""
        from scalerl.rollout.servers.checksums import ExpectedChecksums
        from scalerl.rollout.servers.engines import ENGINES

        placement = ENGINES[self.engine].placement(model_config, self.tp_size, self.engine_kwargs)
        return ExpectedChecksums(placement, dtype, ranks)


@dataclass(frozen=True)
class ClientSettings:
    """The settings of all clients of a set of servers, in any process.

    timeout_s, max_concurrency (samples in flight): from the configuration, so that neither has a default here.
    """

    purpose: Purpose
    max_model_len: int
    timeout_s: float
    max_concurrency: int

    def client(self, replica: Replica) -> RolloutClient:
        from scalerl.rollout.servers.client import RolloutClient

        return RolloutClient(
            replica.url,
            replica.engine,
            key=replica.key,
            max_model_len=self.max_model_len,
            timeout_s=self.timeout_s,
            max_concurrency=self.max_concurrency,
            purpose=self.purpose,
        )
