"""Who may use a rollout server: whoever has the random key that it was started with.

It reaches the server by the environment, where other users do not see it, unlike a command line; it is in no log.
"""

from __future__ import annotations

import os
import secrets

KEY_VARIABLE = "SCALERL_ROLLOUT_KEY"
# All that a stranger may ask.
OPEN_PATH = "/health"


def new_key() -> str:
    return secrets.token_urlsafe(32)


def take_key() -> str:
    """The key of the server that this process is; what it starts does not inherit it."""
    key = os.environ.pop(KEY_VARIABLE, "")
    if not key:
        raise SystemExit(f"{KEY_VARIABLE} is not set: a rollout server needs the key that its clients have")
    return key


def authorization(key: str) -> dict[str, str]:
    """Headers of a request."""
    return {"Authorization": f"Bearer {key}"}


def is_authorized(header: str | None, key: str) -> bool:
    """header: Authorization of a request."""
    return secrets.compare_digest((header or "").encode(), authorization(key)["Authorization"].encode())
