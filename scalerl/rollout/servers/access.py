"""Access to a rollout server by the random key that it was started with.

The key is passed in the environment, which other users cannot see, unlike a command line; it is in no log.
"""

from __future__ import annotations

import os
import secrets

KEY_VARIABLE = "SCALERL_ROLLOUT_KEY"
# The key of a server that answers whoever reaches it; no server of a run has it.
NO_KEY = "none"
# The only path that may be asked without the key.
OPEN_PATH = "/health"


def new_key() -> str:
    return secrets.token_urlsafe(32)


def take_key() -> str:
    """Takes this server process' key from the environment, so that processes it starts do not inherit it."""
    key = os.environ.pop(KEY_VARIABLE, "")
    if not key:
        raise SystemExit(f"{KEY_VARIABLE} is not set: a rollout server needs the key that its clients have")
    return key


def authorization(key: str) -> dict[str, str]:
    """The headers of a request with the key."""
    return {"Authorization": f"Bearer {key}"}


def is_authorized(header: str | None, key: str) -> bool:
    """True if a request's Authorization header has the key."""
    return secrets.compare_digest((header or "").encode(), authorization(key)["Authorization"].encode())
