"""What a set of servers is for: how errors call its servers, and which keys configure them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Purpose:
    """who: what errors call one of the servers.  section: of the configuration that is their `ServerConfig`."""

    who: str
    section: str

    def key(self, name: str) -> str:
        return f"{self.section}.{name}"


POLICY = Purpose("rollout server", "actor_rollout_ref.rollout")
JUDGE = Purpose("judge server", "reward_model.judge")
GENERATION = Purpose("rollout server", "rollout")
