"""Process groups of a trainer rank and the ranks of a rollout server, in which weights are broadcast.

They are not part of a process's torch.distributed world. SGLang joins by `init_custom_process_group`
(sglang/srt/utils/common.py), which determines the store's keys and the order of the bytes here.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

from scalerl.base import rendezvous

if TYPE_CHECKING:
    from scalerl.rollout.servers.buckets import NamedTensors

# Rank of the trainer in each of these groups.
SENDER = 0


def address_towards(url: str) -> str:
    """This machine's address by which the server at a URL can reach it; IPv6 without brackets."""
    server = urlsplit(url)
    family, kind, protocol, _, address = socket.getaddrinfo(server.hostname, server.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Sends nothing; the kernel only looks up the route.
        probe.connect(address)
        return probe.getsockname()[0]


def open_store(address: str, timeout_s: float) -> dist.TCPStore:
    """Opens the store at which the members of a group meet, on a free port (`.port`)."""
    listener = rendezvous.listen(address)
    port = listener.getsockname()[1]
    return rendezvous.store((address, port), world_size=None, timeout_s=timeout_s, listener=listener)


def reach_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The store that another member opened."""
    return rendezvous.store((address, port), world_size=None, timeout_s=timeout_s, listener=None)


def join_group(
    store: dist.Store, *, name: str, rank: int, world_size: int, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Joins a group: waits until all members have joined (gloo), or joins with the first broadcast (nccl).

    name: must differ from the names of this process's other groups.
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
    # Needed by destroy_process_group.
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return cast("dist.ProcessGroup", group)


def leave_group(group: dist.ProcessGroup) -> None:
    dist.destroy_process_group(group)


def broadcast(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Broadcasts flat, uint8 [bytes], from the trainer's rank to the others, where it is overwritten."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = SENDER, 0
    group.broadcast([flat], options).wait()
    if flat.is_cuda:
        # wait() only orders streams, but callers reuse or read the memory from another thread.
        torch.cuda.synchronize(flat.device)


def in_sending_order(named: NamedTensors) -> NamedTensors:
    """Sorts tensors by width of dtype, widest first, so that each begins at a multiple of its width without gaps."""
    return sorted(named, key=lambda item: -item[1].dtype.itemsize)


def pack_bytes(named: NamedTensors) -> Tensor:
    """Copies tensors end to end into uint8 [bytes] on their device."""
    flat = torch.empty(sum(tensor.nbytes for _, tensor in named), dtype=torch.uint8, device=named[0][1].device)
    layout = [(name, tensor.dtype, tensor.shape) for name, tensor in named]
    for (_, view), (_, tensor) in zip(unpack_bytes(flat, layout), named, strict=True):
        view.copy_(tensor.detach())
    return flat


def unpack_bytes(flat: Tensor, layout: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> list[tuple[str, Tensor]]:
    """Views of the tensors in `flat`.  layout: (name, dtype, shape) in the order of the bytes."""
    named, start = [], 0
    for name, dtype, shape in layout:
        end = start + math.prod(shape) * dtype.itemsize
        named.append((name, flat[start:end].view(dtype).view(*shape)))
        start = end
    return named


def num_bytes(layout: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in layout)
