"""Free memory of the trainer's devices while they change hands between servers and trainer: measured, and sufficient.

A step's hand-over: servers generate -> their KV cache and weights leave -> the trainer's parts come, compute and leave
-> the servers' weights come back and are overwritten -> their KV cache comes back. Each rank measures in the calls in
which servers give memory back or take it (`WeightSync`); on a CPU, where servers release nothing, in a sync.
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

Point = Literal[
    "before_release",
    "after_release_kv",
    "after_release",
    "before_sync",
    "after_sync",
    "before_save",
    "before_save_alone",
    "after_save",
]
# The parts of a server's device memory that leave and come back (`Engine.memory_tags`).
Part = Literal["kv_cache", "weights"]
# The bytes that a device lacks, and the error's text.
Lack = tuple[int, str]
# How long memory that a server has released may take to be free, and the time between two looks.
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
_SPLIT = f"split the model over more devices ({_MEGATRON}.tensor_model_parallel_size, pipeline_model_parallel_size)"
_SAVE_ADVICE = f"{_SPLIT}: a save and a load bring parameters and optimizer to the device"
_ADVICE: dict[Point, str] = {
    "after_release": (
        f"{_SPLIT}, or keep other models off the device (param_offload of the reference's and the critic's megatron)"
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

    device: name of the memory.  returning: role -> part -> bytes that are in host memory and come to the device when
    that role computes.
    """

    rank: int
    device: str
    free_bytes: int
    total_bytes: int
    used_bytes: int
    returning: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class DeviceMemory:
    """A trainer rank's record of the free memory of its device, from one hand-over to the next.

    released: part -> bytes that the servers on the device gave back when they released it last.
    """

    # Seconds within which released memory is free.
    wait_s = RELEASE_WAIT_S

    def __init__(
        self, measure: Callable[[], RankMemory], *, hands_over: bool = True, keep_less: str | None = None
    ) -> None:
        """Begins without a measurement.

        measure: as the function `measure`.  hands_over: servers release their memory before the trainer computes.
        keep_less: as `Engine.keep_less`, for errors.
        """
        self.measure, self.hands_over, self.keep_less = measure, hands_over, keep_less
        self.released: dict[Part, int] = {}
        self._free: dict[Point, int] = {}
        self._used: dict[Point, int] = {}

    def record(self, point: Point) -> RankMemory:
        """Measures at this point."""
        return self._noted(point, self.measure())

    def _noted(self, point: Point, memory: RankMemory) -> RankMemory:
        self._free[point], self._used[point] = memory.free_bytes, memory.used_bytes
        return memory

    def record_released(
        self, part: Part, point: Point, before: RankMemory, *, pause: Callable[[float], None] = time.sleep
    ) -> RankMemory:
        """Measures once a part that servers released is free, as a server answers when only its first rank is done.

        before: measured before the release. Waits while the device gained less than the last time or has less than
        what follows needs, and the first time until it gains nothing more; at most `wait_s`.
        """
        memory, waited_s, gained = self.measure(), 0.0, True
        while waited_s < self.wait_s and self._expects_more(part, point, before, memory, gained):
            pause(RELEASE_LOOK_S)
            waited_s += RELEASE_LOOK_S
            last, memory = memory, self.measure()
            gained = memory.free_bytes > last.free_bytes + SETTLED_BYTES
        self.released[part] = max(0, memory.free_bytes - before.free_bytes)
        return self._noted(point, memory)

    def _expects_more(self, part: Part, point: Point, before: RankMemory, memory: RankMemory, gained: bool) -> bool:
        if not self.released.get(part):
            return gained
        freed = memory.free_bytes - before.free_bytes
        return freed < self.released[part] - SETTLED_BYTES or self.lack(point, memory) is not None

    def lack(self, point: Point, memory: RankMemory, returning: Collection[Part] = ()) -> Lack | None:
        """What the device lacks for what follows the point; None where the free memory suffices.

        returning: the parts that servers on this device take back.
        """
        needed = self._needed(point, memory, returning)
        lacking = sum(needed.values()) - memory.free_bytes
        if not needed or lacking <= 0:
            return None
        text = (
            f"device hand-over, {point}: rank {memory.rank} on {memory.device} has {memory.free_bytes / GIB:.2f} of "
            f"{memory.total_bytes / GIB:.2f} GiB free, and {sum(needed.values()) / GIB:.2f} GiB are needed: "
            + ", ".join(f"{name} {size / GIB:.2f}" for name, size in needed.items())
            + f". To change: {_ADVICE[point]}"
        )
        if self.keep_less and point == "after_release":
            text += f", or have the server keep less ({_ROLLOUT}.{self.keep_less})"
        return lacking, text

    def _needed(self, point: Point, memory: RankMemory, returning: Collection[Part]) -> dict[str, int]:
        """The bytes that the device needs free after this point: what comes there next -> bytes."""
        servers = {
            f"the server's {'KV cache' if part == 'kv_cache' else part}": self.released[part]
            for part in returning
            if self.released.get(part)
        }
        if point == "after_release" or (point == "after_sync" and not self.hands_over):
            return trainer_needs(memory)
        if point == "before_sync":
            return trainer_needs(memory, role="actor", parts=("params",)) | servers
        if point in ("before_save", "before_save_alone"):
            return trainer_needs(memory, parts=SAVED_PARTS)
        return servers if point in ("after_sync", "after_save") else {}

    def metrics(self) -> dict[str, Metric]:
        """Metrics of free, used and released memory at the points since the last call."""
        metrics = {f"perf/handover/free_gb/{point}": Metric(free / GIB, "min") for point, free in self._free.items()}
        metrics |= {f"perf/handover/used_gb/{point}": Metric(used / GIB, "max") for point, used in self._used.items()}
        for part, num_bytes in self.released.items():
            metrics[f"perf/handover/{part.removesuffix('_cache')}_gb"] = Metric(num_bytes / GIB, "max")
        self._free, self._used = {}, {}
        return metrics


def trainer_needs(
    memory: RankMemory, *, role: str | None = None, parts: Collection[str] | None = None
) -> dict[str, int]:
    """The bytes that the trainer brings back to the rank's device: role -> bytes.

    Roles take turns, so that without `role` the largest counts alone.
    """
    sizes = {
        f"the trainer's {name}": sum(size for part, size in away.items() if parts is None or part in parts)
        for name, away in memory.returning.items()
        if role in (None, name)
    }
    name, size = max(sizes.items(), key=lambda item: item[1], default=("", 0))
    return {name: size} if size else {}


def check_room(lacks: Iterable[Lack | None]) -> None:
    """Raises HandoverError for the rank that lacks the most, if a rank lacks memory.  lacks: of all ranks."""
    short = [lack for lack in lacks if lack is not None]
    if short:
        _, text = max(short)
        raise HandoverError(text + (f" ({len(short) - 1} other ranks lack memory too)" if len(short) > 1 else ""))


def check_room_together(lack: Lack | None) -> None:
    """Collective: `check_room` of all ranks, on each of them, so that no rank waits for one that raised.

    lack: of this rank.
    """
    import torch.distributed as dist

    lacks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lacks, lack)
    check_room(lacks)


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


def bucket_bytes_that_fit(free_bytes: int, *, limit_bytes: int, largest_bytes: int) -> int:
    """limit_bytes, halved until BUCKET_COPIES of it take at most BUCKET_FREE_FRAC of what is free, or largest_bytes.

    Halved, so that a little more or less of free memory does not make another plan in every sync.
    largest_bytes: of the largest tensor, which has a bucket to itself.
    """
    room = int(free_bytes * BUCKET_FREE_FRAC) // BUCKET_COPIES
    fitting = limit_bytes
    while fitting > max(room, largest_bytes):
        fitting //= 2
    return max(fitting, largest_bytes)


def agreed_bucket_bytes(free_bytes: int, device: str, *, limit_bytes: int, largest_bytes: int) -> int:
    """Collective: the smallest over the ranks of `bucket_bytes_that_fit`, so that all of them cut the same buckets.

    Raises HandoverError on every rank where one has no room for the largest tensor.
    """
    import torch.distributed as dist

    fitting = bucket_bytes_that_fit(free_bytes, limit_bytes=limit_bytes, largest_bytes=largest_bytes)
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (fitting, free_bytes, device))
    check_largest([(free, where) for _, free, where in by_rank], largest_bytes=largest_bytes)
    return min(rank_fitting for rank_fitting, _, _ in by_rank)


def check_largest(ranks: Sequence[tuple[int, str]], *, largest_bytes: int) -> None:
    """Raises HandoverError if a rank has no room for the largest tensor. ranks: (free bytes, device) of each."""
    rank = min(range(len(ranks)), key=lambda index: ranks[index][0])
    free_bytes, device = ranks[rank]
    if free_bytes < BUCKET_COPIES * largest_bytes:
        raise HandoverError(
            f"weight sync: rank {rank} on {device} has {free_bytes / GIB:.2f} GiB free, and the largest tensor needs "
            f"{BUCKET_COPIES * largest_bytes / GIB:.2f} GiB ({BUCKET_COPIES} copies of {largest_bytes / GIB:.2f}), "
            f"however small {_ROLLOUT}.update_weights_bucket_megabytes is. To change: {_ADVICE['before_sync']}"
        )


# --- measuring ---


def measure(rank: int, device: str, engines: Mapping[str, Any]) -> RankMemory:
    """Measures the memory of this rank.  device: cuda or cpu.  engines: role -> MegatronEngine.

    With cuda: of the rank's device, for all processes, once torch has given back the memory that it keeps for reuse.
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
