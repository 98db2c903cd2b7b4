"""Measures free memory at each point of the hand-over between servers and trainer, and checks that it suffices.

A step's hand-over: servers generate -> their KV cache and weights leave -> the trainer's parts come, compute and leave
-> weights come back and are overwritten -> the KV cache comes back. On a CPU servers release nothing; memory is
measured all the same.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from scalerl.base.files import GIB
from scalerl.errors import UserError
from scalerl.models import ModelShape
from scalerl.tracking.metrics import Metric

HandoverPoint = Literal[
    "before_release",
    "after_release_kv",
    "after_release",
    "before_sync",
    "after_resume_weights",
    "after_sync",
    "after_resume_kv",
    "before_save",
    "before_save_alone",
    "after_save",
]
# How long what a server has released may take to be free for every rank of its devices, and the time between two looks.
RELEASE_WAIT_S = 20.0
RELEASE_LOOK_S = 0.1
# A difference of free memory up to this means nothing: CUDA maps memory in pieces, and other processes have some.
SETTLED_BYTES = 64 * 2**20
# The parts of a model that a checkpoint holds.
SAVED_PARTS = ("params", "optimizer")
# Share of the free memory that the buckets of a weight sync may take.
BUCKET_FREE_FRAC = 0.5
# Most copies of a bucket on a device at once: the joined tensors, their flat copy, and what joins the next one.
BUCKET_COPIES = 3

_MEGATRON = "actor_rollout_ref.actor.megatron"
_ROLLOUT = "actor_rollout_ref.rollout"
_UTILIZATION = f"lower {_ROLLOUT}.gpu_memory_utilization"
_SAVE_ADVICE = (
    f"split the model over more devices ({_MEGATRON}.tensor_model_parallel_size, pipeline_model_parallel_size): a save "
    "and a load bring parameters and optimizer to the device"
)
_ADVICE: dict[HandoverPoint, str] = {
    "after_release": (
        f"split the model over more devices ({_MEGATRON}.tensor_model_parallel_size, pipeline_model_parallel_size), or "
        "keep other models off the device (param_offload of the reference's and the critic's megatron)"
    ),
    "before_sync": (
        f"{_UTILIZATION}, or set {_MEGATRON}.grad_offload=true and {_MEGATRON}.optimizer_offload=true, which a sync "
        "does not need on the device"
    ),
    "after_sync": (
        f"{_UTILIZATION}, or set {_MEGATRON}.param_offload=true, {_MEGATRON}.grad_offload=true and "
        f"{_MEGATRON}.optimizer_offload=true"
    ),
    "before_save": _SAVE_ADVICE,
    "before_save_alone": _SAVE_ADVICE,
    "after_save": f"{_UTILIZATION}, or set {_MEGATRON}.param_offload=true and {_MEGATRON}.optimizer_offload=true",
}


class HandoverError(UserError, RuntimeError):
    """A device has less free memory than what comes next needs."""


@dataclass(frozen=True)
class RankMemory:
    """The memory of a trainer rank's device. used_bytes: by the rank's process.

    device: name of the memory, the same for all ranks on the CPU of one machine.
    returning: role -> part -> bytes that are in host memory and come to the device when that role computes.
    """

    rank: int
    device: str
    free_bytes: int
    total_bytes: int
    used_bytes: int
    returning: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


# A point after a release -> what servers gave back, and the point before that release.
_RELEASES: dict[HandoverPoint, tuple[str, HandoverPoint]] = {
    "after_release_kv": ("kv", "before_release"),
    "after_release": ("weights", "after_release_kv"),
}


class Handover:
    """The driver's record of free memory, from one hand-over to the next."""

    def __init__(self, keep_less: str | None = None) -> None:
        """Starts without a measurement.  keep_less: of the servers' engine, for errors."""
        self._keep_less = keep_less
        self._free: dict[HandoverPoint, dict[int, int]] = {}
        self._used: dict[HandoverPoint, int] = {}
        # Device -> bytes that its servers gave back last.
        self._released: dict[str, dict[str, int]] = {"kv": {}, "weights": {}}

    def record_released(
        self,
        point: HandoverPoint,
        measure: Callable[[], Sequence[RankMemory]],
        *,
        wait_s: float = RELEASE_WAIT_S,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Calls `record` once the released memory is free, as a server answers when only its first rank is done.

        Waits while a device has less than servers gave back there the last time or than what follows needs, and the
        first time until it gains nothing more; at most wait_s.
        """
        ranks, waited_s = measure(), 0.0
        gained = True
        while waited_s < wait_s and self._expects_more(point, ranks, gained=gained):
            pause(RELEASE_LOOK_S)
            waited_s += RELEASE_LOOK_S
            before = {memory.rank: memory.free_bytes for memory in ranks}
            ranks = measure()
            gained = any(memory.free_bytes > before[memory.rank] + SETTLED_BYTES for memory in ranks)
        self.record(point, ranks)

    def _expects_more(self, point: HandoverPoint, ranks: Sequence[RankMemory], *, gained: bool) -> bool:
        what, before = _RELEASES.get(point, ("", point))
        last = self._released.get(what)
        if before not in self._free or not last:
            return gained
        freed = released_bytes(ranks, self._free[before])
        if any(freed.get(device, 0) < num_bytes - SETTLED_BYTES for device, num_bytes in last.items()):
            return True
        return bool(short_of(ranks, self._needed(point, ranks, ranks)))

    def record(
        self, point: HandoverPoint, ranks: Sequence[RankMemory], *, servers: Collection[int] | None = None
    ) -> None:
        """Records a measurement of every rank. Raises HandoverError if a device lacks room for what follows the point.

        servers: the ranks on whose devices servers take back what they released; None: all.
        """
        self._free[point] = {memory.rank: memory.free_bytes for memory in ranks}
        self._used[point] = max(memory.used_bytes for memory in ranks)
        if point in _RELEASES and (before := _RELEASES[point][1]) in self._free:
            self._released[_RELEASES[point][0]] = released_bytes(ranks, self._free[before])
        with_servers = [memory for memory in ranks if servers is None or memory.rank in servers]
        needed = self._needed(point, with_servers, ranks)
        if needed:
            check_room(point, ranks, needed, self._keep_less)

    def _needed(
        self, point: HandoverPoint, with_servers: Sequence[RankMemory], ranks: Sequence[RankMemory]
    ) -> dict[str, dict[str, int]]:
        """The bytes that each device needs free after this point: device -> what comes there next -> bytes."""
        devices = {memory.device for memory in with_servers}
        if point == "after_release":
            return trainer_needs(ranks)
        if point == "before_sync":
            needed = trainer_needs(ranks, role="actor", parts=("params",))
            for device in devices:
                if num_bytes := self._released["weights"].get(device, 0):
                    needed.setdefault(device, {})["the server's weights"] = num_bytes
            return needed
        if point in ("before_save", "before_save_alone"):
            return trainer_needs(ranks, parts=SAVED_PARTS)
        if point in ("after_sync", "after_save"):
            return {
                device: {"the server's KV cache": self._released["kv"][device]}
                for device in devices
                if self._released["kv"].get(device)
            }
        return {}

    def metrics(self) -> dict[str, Metric]:
        """Metrics of free, used and released memory at the points since the last call."""
        metrics = {
            f"perf/handover/free_gb/{point}": Metric(min(free.values()) / GIB, "min")
            for point, free in self._free.items()
        }
        metrics |= {f"perf/handover/used_gb/{point}": Metric(used / GIB, "max") for point, used in self._used.items()}
        for what, by_device in self._released.items():
            if by_device:
                metrics[f"perf/handover/{what}_gb"] = Metric(max(by_device.values()) / GIB, "max")
        self._free, self._used = {}, {}
        return metrics


def released_bytes(ranks: Iterable[RankMemory], free_before: Mapping[int, int]) -> dict[str, int]:
    """The bytes that became free on each device, as the first of its ranks measured them."""
    released: dict[str, int] = {}
    for memory in ranks:
        released.setdefault(memory.device, max(0, memory.free_bytes - free_before[memory.rank]))
    return released


def trainer_needs(
    ranks: Iterable[RankMemory], *, role: str | None = None, parts: Collection[str] | None = None
) -> dict[str, dict[str, int]]:
    """The bytes that the trainer brings back to each device: device -> role -> bytes.

    Roles take turns, so that without `role` the largest counts alone.
    """
    needed: dict[str, dict[str, int]] = {}
    for memory in ranks:
        sizes = {
            f"the trainer's {name}": sum(size for key, size in away.items() if parts is None or key in parts)
            for name, away in memory.returning.items()
            if role in (None, name)
        }
        name, size = max(sizes.items(), key=lambda item: item[1], default=("", 0))
        if size:
            on_device = needed.setdefault(memory.device, {})
            on_device[name] = on_device.get(name, 0) + size
    return needed


def short_of(ranks: Iterable[RankMemory], needed: Mapping[str, Mapping[str, int]]) -> list[tuple[int, RankMemory]]:
    """Finds the ranks whose device has less free than it needs: (lacking bytes, memory). needed: as `check_room`."""
    return [
        (total - memory.free_bytes, memory)
        for memory in ranks
        if (total := sum(needed.get(memory.device, {}).values())) > memory.free_bytes
    ]


def check_room(
    point: HandoverPoint,
    ranks: Iterable[RankMemory],
    needed: Mapping[str, Mapping[str, int]],
    keep_less: str | None = None,
) -> None:
    """Raises HandoverError, naming the rank that lacks the most, if a device has too little free memory.

    needed: device -> what comes there -> bytes.  keep_less: as `Engine.keep_less`.
    """
    short = short_of(ranks, needed)
    if not short:
        return
    _, worst = max(short, key=lambda pair: pair[0])
    parts = needed[worst.device]
    others = f" ({len(short) - 1} other ranks lack memory too)" if len(short) > 1 else ""
    raise HandoverError(
        f"device hand-over, {point}: rank {worst.rank} on {worst.device} has {worst.free_bytes / GIB:.2f} of "
        f"{worst.total_bytes / GIB:.2f} GiB free, and {sum(parts.values()) / GIB:.2f} GiB are needed: "
        + ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        + f"{others}. To change: {_ADVICE[point]}"
        + (f", or have the server keep less ({_ROLLOUT}.{keep_less})" if keep_less and point == "after_release" else "")
    )


# --- buckets ---


def hashed_expert_bytes(shape: ModelShape, itemsize: int, tp_size: int, *, num_ranks: int) -> int:
    """Bytes of experts that a trainer rank on a GPU keeps while it makes the checksums of some ranks of a server.

    SGLang's hash on a GPU takes a whole tensor, and all experts of a layer are in two: their parts are kept until the
    last one has come, when those of the larger tensor, on one rank of the server, are joined. 0 for dense models.
    tp_size: ranks of the server.  num_ranks: those whose checksums this rank makes.
    """
    if num_ranks == 0:
        return 0
    matrix = shape.num_experts * shape.moe_ffn_hidden_size * shape.hidden_size * itemsize
    return -(-(3 * num_ranks + 2) * matrix // tp_size)


def bucket_bytes_that_fit(free_bytes: int, *, limit_bytes: int, largest_bytes: int, num_copies: int) -> int:
    """limit_bytes, halved until num_copies of it take at most BUCKET_FREE_FRAC of what is free; at least largest_bytes.

    Halved, so that a little more or less of free memory does not make another plan in every sync.
    largest_bytes: of the largest tensor, which has a bucket to itself.
    """
    room = int(free_bytes * BUCKET_FREE_FRAC) // num_copies
    fitting = limit_bytes
    while fitting > max(room, largest_bytes):
        fitting //= 2
    return max(fitting, largest_bytes)


def agreed_bucket_bytes(free_bytes: int, device: str, *, limit_bytes: int, largest_bytes: int, num_copies: int) -> int:
    """Collective: the smallest over the ranks of `bucket_bytes_that_fit`, so that all of them cut the same buckets.

    Raises HandoverError on every rank where one has no room for the largest tensor.
    """
    import torch.distributed as dist

    fitting = bucket_bytes_that_fit(
        free_bytes, limit_bytes=limit_bytes, largest_bytes=largest_bytes, num_copies=num_copies
    )
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (fitting, free_bytes, device))
    check_largest([(free, where) for _, free, where in by_rank], largest_bytes=largest_bytes, num_copies=num_copies)
    return min(rank_fitting for rank_fitting, _, _ in by_rank)


def check_largest(ranks: Sequence[tuple[int, str]], *, largest_bytes: int, num_copies: int) -> None:
    """Raises HandoverError if a rank has no room for the largest tensor. ranks: (free bytes, device) of each."""
    rank = min(range(len(ranks)), key=lambda index: ranks[index][0])
    free_bytes, device = ranks[rank]
    if free_bytes < num_copies * largest_bytes:
        raise HandoverError(
            f"weight sync: rank {rank} on {device} has {free_bytes / GIB:.2f} GiB free, and the largest tensor needs "
            f"{num_copies * largest_bytes / GIB:.2f} GiB ({num_copies} copies of {largest_bytes / GIB:.2f}), however "
            f"small {_ROLLOUT}.update_weights_bucket_megabytes is. To change: {_ADVICE['before_sync']}"
        )


# --- measuring ---


def measure(rank: int, device: str, engines: Mapping[str, Any]) -> RankMemory:
    """Measures the memory of this rank.  device: cuda or cpu.  engines: role -> MegatronEngine.

    With cuda: of the rank's device, used by all processes, after what torch keeps for reuse has been given back.
    With cpu: of the machine, within the limit of this process' control group.
    """
    returning = {role: engine.away_bytes() for role, engine in engines.items()}
    host = socket.gethostname()
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
        # Memory that a server has read by its handle is still counted as ours until it is collected.
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        return RankMemory(rank, f"{host} GPU {uuid}", free, total, torch.cuda.memory_reserved(), returning)
    used = psutil.Process().memory_info().rss
    return RankMemory(rank, f"{host} cpu", host_free_bytes(), psutil.virtual_memory().total, used, returning)


def free_for_buckets(device: str) -> tuple[int, str]:
    """Free bytes and the name of this rank's device during a sync; what torch keeps for reuse counts as free."""
    if device == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info()
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return free + unused, f"{socket.gethostname()} cuda:{torch.cuda.current_device()}"
    return host_free_bytes(), f"{socket.gethostname()} cpu"


def host_free_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this machine can still give, or that the process' control group may still take if that is less."""
    free = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return free
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        taken = int((cgroup / "memory.current").read_text()) - int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):  # the top group, or version 1
        return free
    return max(0, min(free, int(limit) - taken))
