"""The purpose of a set of servers: their name in errors, and the keys that configure them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Purpose:
    """The purpose of servers.  who: their name in errors.  section: configuration section of their `ServerConfig`."""

    who: str
    section: str

    def key(self, name: str) -> str:
        return f"{self.section}.{name}"


POLICY = Purpose("rollout server", "actor_rollout_ref.rollout")
JUDGE = Purpose("judge server", "reward_model.judge")
GENERATION = Purpose("rollout server", "rollout")
