"""The address at which processes of torch.distributed meet: a port that one of them holds before the others know it."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

BACKLOG = 2048


def listen(host: str) -> socket.socket:
    """A socket that listens on a free port of this address; torch by itself would listen on all of the machine's.

    Ranks that come before `store` is called wait in it.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(BACKLOG)
    return listener


def store(
    address: tuple[str, int], *, world_size: int | None, timeout_s: float, listener: socket.socket | None
) -> dist.TCPStore:
    """The store at which the ranks meet.  world_size: None: any number of them.

    listener: of `listen`, on the rank that serves the store; None on the others.
    """
    import torch.distributed as dist

    host, port = address
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=listener is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
