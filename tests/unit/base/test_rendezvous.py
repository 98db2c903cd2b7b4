"""The port at which ranks meet."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch.distributed as dist

import scalerl
from scalerl.base import rendezvous


def test_the_port_is_held_from_the_moment_it_is_known() -> None:
    """Until the store is served from it, and after: nobody else can take it in between."""
    listener = rendezvous.listen("127.0.0.1")
    host, port = listener.getsockname()

    def refused() -> None:
        with socket.socket() as other, pytest.raises(OSError):
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind((host, port))

    refused()
    # A rank that is early waits in the socket.
    early = socket.create_connection((host, port))
    server = rendezvous.store((host, port), world_size=2, timeout_s=20, listener=listener)
    refused()
    client = rendezvous.store((host, port), world_size=2, timeout_s=20, listener=None)
    client.set("key", "value")
    assert server.get("key") == b"value"
    early.close()


def test_only_this_address_answers() -> None:
    listener = rendezvous.listen("127.0.0.1")
    port = listener.getsockname()[1]
    store = rendezvous.store(("127.0.0.1", port), world_size=1, timeout_s=20, listener=listener)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    assert isinstance(store, dist.Store)


def test_every_store_is_opened_here() -> None:
    """A store that torch opens by itself listens on every address of the machine."""
    files = [path for path in Path(scalerl.__file__).parent.rglob("*.py") if "TCPStore(" in path.read_text("utf-8")]
    assert files == [Path(rendezvous.__file__)]
