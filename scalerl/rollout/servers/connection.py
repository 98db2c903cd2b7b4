"""Connections to a server: with its key, past any proxy, and lost when its machine answers no more.

The random key of a server is passed in the environment, which other users cannot see, unlike a command line; it is in
no log.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    import aiohttp

KEY_VARIABLE = "SCALERL_ROLLOUT_KEY"
# The key of a server that answers whoever reaches it; no server of a run has it.
NO_KEY = "none"
# The only path that may be asked without the key.
OPEN_PATH = "/health"
# A machine that is switched off ends no connection; one that works answers these probes, however busy its server is. So
# it is given up after 30 + 6 x 10 seconds of silence, not at the request's time limit. Not every system has them all.
KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 90_000}


def watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Makes the socket of a connection that breaks when the other machine answers no more (see KEEP_ALIVE)."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    watch(made)
    return made


def watch(connection: socket.socket) -> None:
    """Has a connection break when the other machine answers no more (see KEEP_ALIVE)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class WatchedConnection(http.client.HTTPConnection):
    """An HTTP connection that breaks when the other machine answers no more, also while it is being made.

    timeout: seconds that a machine which answers may take for each part of its answer.
    """

    def __init__(self, host: str, timeout: float) -> None:
        """Prepares the connection, which the first request makes.  host: with the port."""
        super().__init__(host, timeout=timeout)
        self.answer_s = timeout

    def connect(self) -> None:
        # The kernel takes connections for a server, however busy that is.
        self.timeout = min(self.answer_s, KEEP_ALIVE["TCP_USER_TIMEOUT"] / 1000)
        super().connect()
        watch(self.sock)
        self.sock.settimeout(self.answer_s)


class WatchedTLSConnection(WatchedConnection, http.client.HTTPSConnection):
    """A connection of https that breaks as a `WatchedConnection` does."""


def ask(
    url: str, method: str = "GET", body: bytes | None = None, *, headers: Mapping[str, str], timeout_s: float
) -> tuple[int, str]:
    """Asks a server, and returns the status and the text of its answer.

    Goes past any proxy that the environment names (http_proxy), which may not reach the nodes of a cluster: as
    aiohttp's requests do.  Raises OSError or HTTPException when no answer comes.
    """
    where = urlsplit(url)
    kind = WatchedTLSConnection if where.scheme == "https" else WatchedConnection
    with contextlib.closing(kind(where.netloc, timeout_s)) as connection:
        connection.request(method, urlunsplit(("", "", where.path, where.query, "")), body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


# --- keys ---


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
