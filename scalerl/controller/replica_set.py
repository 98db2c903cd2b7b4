"""`ReplicaSet`: the rollout servers of a run; those that are lost are ended and started again, within a limit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import ray

from scalerl.config.schema import ModelConfig, RolloutConfig
from scalerl.controller.calls import values_of
from scalerl.controller.pools import ActorSpec, ResourcePool
from scalerl.controller.replica import ReplicaHost, ServerSettings
from scalerl.hybrid.replicas import Replica
from scalerl.rollout.requests import RolloutError
from scalerl.rollout.server import ServerStartError

if TYPE_CHECKING:
    from scalerl.rollout.weights import EngineKind

logger = logging.getLogger(__name__)

MAX_RESTARTS_KEY = "actor_rollout_ref.rollout.max_restarts"


@dataclass(frozen=True)
class ReplicaPlan:
    """Where one server runs. devices: those of the pool on that node, counted from 0: in the trainer's its ranks'."""

    index: int
    node: int
    devices: tuple[int, ...]

    def gpu_ids(self, pool: ResourcePool, by_rank: Sequence[str]) -> list[str]:
        """What the node calls these devices. by_rank: of each trainer rank, what it calls its own."""
        return [by_rank[self.node * pool.devices_per_node + device] for device in self.devices]


def plan_replicas(pool: ResourcePool, rollout: RolloutConfig) -> list[ReplicaPlan]:
    """Replicas in device order, each on one node. On the trainer's CPUs any number of them, dealt over the nodes."""
    tp_size = rollout.tensor_model_parallel_size
    per_node = max(1, pool.devices_per_node // tp_size)
    count = rollout.num_replicas or per_node * pool.nnodes
    plans = []
    for index in range(count):
        node = index // per_node % pool.nnodes
        start = index % per_node * tp_size
        plans.append(ReplicaPlan(index, node, tuple(range(start, start + tp_size))))
    return plans


class ReplicaSet:
    """One host per replica. replicas: as they answer now; a restarted one has another address."""

    def __init__(
        self,
        pool: ResourcePool,
        model: ModelConfig,
        rollout: RolloutConfig,
        *,
        gpu_ids: Sequence[str] | None,
        max_model_len: int,
        log_dir: Path,
        timeout_s: float,
        owns_devices: bool = False,
        single_node: bool | None = None,
        synced: bool = False,
        first_step: int = 0,
    ) -> None:
        """Starts the servers; `wait_ready` returns when they answer.

        gpu_ids: of the ranks that hold the pool's devices; None on a CPU, and where the servers are their owners.
        owns_devices: the servers take the pool's devices, which nobody else has.
        first_step: as `server_seed`.
        synced: a trainer gives them weights, so they may be such that served another run.
        single_node: whether all who talk to them are on their machine; None: whether the pool is one machine.
        """
        tp_size = rollout.tensor_model_parallel_size
        single_node = pool.nnodes == 1 if single_node is None else single_node
        self.rollout, self.timeout_s = rollout, timeout_s
        self.replicas: list[Replica] = []
        # Index -> how it ended. They have no process until `restart_down`.
        self.down: dict[int, str] = {}
        self.num_restarts: dict[int, int] = {}
        self.pool, self.actors = pool, []
        for plan in plan_replicas(pool, rollout):
            settings = ServerSettings(
                model_path=model.path,
                rollout=rollout,
                device=pool.device,
                gpu_ids=None if gpu_ids is None else tuple(plan.gpu_ids(pool, gpu_ids)),
                max_model_len=max_model_len,
                single_node=single_node,
                trust_remote_code=model.trust_remote_code,
            )
            num_devices = tp_size if owns_devices else 0
            spec = ActorSpec(ReplicaHost, plan.node, num_devices, key=(synced, settings.of_process()))
            self.actors.append(
                pool.start(
                    spec,
                    {"max_concurrency": 2},
                    plan.index,
                    settings,
                    log_dir=str(log_dir.resolve()),
                    first_step=first_step,
                )
            )
        self.hosts = [one.actor for one in self.actors]
        self.starting = [host.start.remote() for host in self.hosts]

    def wait_ready(self) -> None:
        """Raises ServerStartError with the last log lines of a server that does not start."""
        started = values_of("rollout server start", self.starting, self.timeout_s)
        kind = cast("EngineKind", self.rollout.name)
        tp_size = self.rollout.tensor_model_parallel_size if kind == "sglang" else 1
        self.replicas = [Replica(url, kind, tp_size, key) for url, key in started]

    def end(self, index: int, why: str) -> None:
        """Kills what is left of a lost server; it is down then. Raises RolloutError when it may not be restarted."""
        (how,) = values_of("rollout server end", [self.hosts[index].end.remote()], self.timeout_s)
        self._count_down(index, f"rollout server {index} was lost: {why}\n{how}")

    def restart_down(self) -> list[int]:
        """Starts the servers that are down. -> their indices.

        Raises RolloutError when one does not start within its restarts.
        """
        restarted = sorted(self.down)
        while self.down:
            starting = {index: self.hosts[index].start.remote() for index in self.down}
            for index, call in starting.items():
                self.num_restarts[index] = self.num_restarts.get(index, 0) + 1
                nth, limit = self.num_restarts[index], self.rollout.max_restarts
                logger.warning("%s\nRestart %d of at most %d.", self.down[index], nth, limit)
                try:
                    ((url, key),) = values_of("rollout server restart", [call], self.timeout_s)
                except ServerStartError as error:
                    self._count_down(index, str(error))
                    continue
                del self.down[index]
                self.replicas[index] = replace(self.replicas[index], url=url, key=key)
        return restarted

    def leave(self) -> None:
        """The servers forget the run and wait for another, each with its host."""
        values_of("rollout server leave", [host.leave.remote() for host in self.hosts], self.timeout_s)
        self.pool.keep(self.actors)

    def stop(self) -> None:
        stopping = [host.stop.remote() for host in self.hosts]
        for host, call in zip(self.hosts, stopping, strict=True):
            try:
                ray.get(call, timeout=20)
            except Exception as error:
                logger.warning("rollout server did not stop by itself: %s", error)
            ray.kill(host)

    def _count_down(self, index: int, how: str) -> None:
        used, limit = self.num_restarts.get(index, 0), self.rollout.max_restarts
        if used >= limit:
            raise RolloutError(
                f"{how}\nIt was restarted {used} times in this run, {MAX_RESTARTS_KEY}={limit}; raise it if the "
                "machine is to blame and not the server"
            )
        self.down[index] = how
