"""The purpose of a set of servers: their name in errors, and the keys that configure them."""

from __future__ import annotations

from dataclasses import dataclass


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
