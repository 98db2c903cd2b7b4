"""Process groups of one trainer rank and the ranks of one rollout server, through which weights are broadcast.

They exist beside a process's own torch.distributed world. SGLang joins in `init_custom_process_group`
(sglang/srt/utils/common.py); the store's keys and the order of the bytes here are those that it expects.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

from scalerl.servers.weights import NamedTensors

# Of the trainer rank in each of these groups.
SENDER = 0
ANY_PORT = 0


def address_towards(url: str) -> str:
    """This machine's address as the server at that URL reaches it; IPv6 without brackets."""
    server = urlsplit(url)
    family, kind, protocol, _, address = socket.getaddrinfo(server.hostname, server.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Sends nothing: the kernel looks up the route.
        probe.connect(address)
        return probe.getsockname()[0]


def open_store(address: str, timeout_s: float) -> dist.TCPStore:
    """Where the members of a group meet, on a port of its own choice (`.port`)."""
    # By itself torch would listen on every address of the machine.
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, ANY_PORT))
    listener.listen()
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def reach_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def join_group(
    store: dist.Store, *, name: str, rank: int, world_size: int, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Blocks until all members have joined (gloo), or joins with the first broadcast (nccl).

    name: no other group of this process may have it.
    """
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        Backend(backend),
        dist.PrefixStore(name, store),
        group_name=cast("Any", name),
        timeout=timedelta(seconds=timeout_s),
    )
    # What destroy_process_group asks for.
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return cast("dist.ProcessGroup", group)


def leave_group(group: dist.ProcessGroup) -> None:
    dist.destroy_process_group(group)


def broadcast(flat: Tensor, group: dist.ProcessGroup) -> None:
    """From the trainer's rank to the others. flat: uint8 [bytes]; overwritten on the others."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = SENDER, 0
    group.broadcast([flat], options).wait()
    if flat.is_cuda:
        # wait() orders streams; who calls this reuses the memory, or reads it, from another thread.
        torch.cuda.synchronize(flat.device)


def in_sending_order(named: NamedTensors) -> NamedTensors:
    """Widest dtype first: tensors lie one right after the other, and each must begin at a multiple of its width."""
    return sorted(named, key=lambda item: -item[1].dtype.itemsize)


def pack(named: NamedTensors) -> Tensor:
    """uint8 [bytes]: the tensors one right after the other, on their device."""
    flat = torch.empty(sum(x.nbytes for _, x in named), dtype=torch.uint8, device=named[0][1].device)
    layout = [(name, x.dtype, x.shape) for name, x in named]
    for (_, place), (_, tensor) in zip(unpack(flat, layout), named, strict=True):
        place.copy_(tensor.detach())
    return flat


def unpack(flat: Tensor, layout: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> list[tuple[str, Tensor]]:
    """Views into `flat`. layout: (name, dtype, shape) in the order of the bytes."""
    found, start = [], 0
    for name, dtype, shape in layout:
        end = start + math.prod(shape) * dtype.itemsize
        found.append((name, flat[start:end].view(dtype).view(*shape)))
        start = end
    return found


def num_bytes(layout: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in layout)
