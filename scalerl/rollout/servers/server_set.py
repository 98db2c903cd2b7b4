"""`ServerSet`: the servers of a run for one purpose; lost servers are ended and started again, within a limit."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle

from scalerl.base.process import in_daemon
from scalerl.cluster.failures import values_of
from scalerl.cluster.pools import ActorSpec, PooledActor, ResourcePool
from scalerl.config.schema import ModelConfig, ServerConfig
from scalerl.config.servers import ReplicaRoom, quantization_of
from scalerl.models.adapters import Adapter
from scalerl.rollout.servers.client import ClientSettings, Replica, RolloutClient
from scalerl.rollout.servers.engines import ENGINES, Launch
from scalerl.rollout.servers.host import ServerHost, process_key
from scalerl.rollout.servers.process import ServerNotReadyError, ServerStartError
from scalerl.rollout.servers.recovery import LostServer
from scalerl.rollout.servers.requests import POLICY_ADAPTER, RolloutError

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Index of a replica -> client of its server.
Clients = Mapping[int, RolloutClient]


@dataclass(frozen=True)
class ReplicaPlan:
    """Where one server runs.  nodes: of the pool, neighbours, the first of which answers.

    devices: indices of the pool's devices on each of these nodes, as the trainer's ranks have them.
    """

    index: int
    nodes: tuple[int, ...]
    devices: tuple[int, ...]

    def gpu_ids(self, pool: ResourcePool, by_rank: Sequence[str]) -> list[list[str]]:
        """Ray's ids of these devices, of each node.  by_rank: the id of each trainer rank's device."""
        return [[by_rank[node * pool.devices_per_node + device] for device in self.devices] for node in self.nodes]


def plan_replicas(pool: ResourcePool, config: ServerConfig) -> list[ReplicaPlan]:
    """Plans the replicas in device order; on the trainer's CPUs any number, dealt over the nodes."""
    room = ReplicaRoom(pool.nnodes, pool.devices_per_node, config.tensor_model_parallel_size)
    per_node, places = max(1, pool.devices_per_node // room.devices_each), pool.nnodes // room.nodes_each
    plans = []
    for index in range(room.planned(config.num_replicas)):
        node, start = index // per_node % places * room.nodes_each, index % per_node * room.devices_each
        nodes, devices = range(node, node + room.nodes_each), range(start, start + room.devices_each)
        plans.append(ReplicaPlan(index, tuple(nodes), tuple(devices)))
    return plans


def launches(launch: Launch, plan: ReplicaPlan, gpu_ids: Sequence[Sequence[str]] | None) -> list[Launch]:
    """The launch settings of a replica's process on each of its nodes.  gpu_ids: by node; None: Ray's, or a CPU."""
    return [
        replace(
            launch, nnodes=len(plan.nodes), node_rank=rank, gpu_ids=None if gpu_ids is None else tuple(gpu_ids[rank])
        )
        for rank in range(len(plan.nodes))
    ]


class ServerSet:
    """The servers of one purpose, each with a host actor. replicas: their addresses, which change with a restart.

    The life of a server: started, in service; lost -> ended -> restarted -> what its purpose needs before it serves
    -> in service. Whoever asks the servers learns of successors from the owner of the set.
    """

    def __init__(
        self,
        settings: ClientSettings,
        pool: ResourcePool,
        model: ModelConfig,
        config: ServerConfig,
        *,
        gpu_ids: Sequence[str] | None,
        log_dir: Path,
        timeout_s: float,
        single_node: bool,
        owns_devices: bool = False,
        synced: bool = False,
        returns_experts: bool = False,
        adapter: Adapter | None = None,
        releases_memory: bool = False,
        first_step: int = 0,
    ) -> None:
        """Prepares the servers; `start` starts them, and `wait_ready` returns when they answer.

        settings: of the clients that ask the servers.
        gpu_ids: of the ranks that hold the pool's devices; None on a CPU, and where the servers own the devices.
        owns_devices: the servers take the pool's devices, which nobody else has.
        first_step: as `server_seed`.  releases_memory, returns_experts, adapter: as `Launch`.
        synced: a trainer gives them weights, so servers that served another such run may be used.
        single_node: whether all processes that ask them, this one too, are on their machine.
        """
        self.purpose, self.config, self.timeout_s = settings.purpose, config, timeout_s
        self.settings = settings
        self.replicas: list[Replica] = []
        # This process's client of each replica.
        self.clients: dict[int, RolloutClient] = {}
        # Index of a server without a process, until `restart_down` -> how it ended.
        self.down: dict[int, str] = {}
        self.num_restarts_of: dict[int, int] = {}
        self.pool = pool
        # All actors; of each server the one that starts and ends it.
        self.actors: list[PooledActor] = []
        self.hosts: list[ActorHandle] = []
        self.starting: list[ray.ObjectRef] = []
        self.gpu_ids, self.owns_devices, self.first_step = gpu_ids, owns_devices, first_step
        # Of all actors.
        self.host_options: dict[str, Any] = {"single_node": single_node, "log_dir": str(log_dir.resolve())}
        self.launch = Launch(
            # As this process sees it: a host that an earlier run left may be in another directory.
            model_path=os.path.abspath(str(model.path)),
            config=config,
            device=pool.device,
            max_model_len=settings.max_model_len,
            trust_remote_code=model.trust_remote_code,
            releases_memory=releases_memory,
            synced=synced,
            returns_experts=returns_experts,
            adapter=adapter,
        )

    def start(self) -> None:
        """Begins to start each server, with an actor on each of its nodes."""
        for plan in plan_replicas(self.pool, self.config):
            self._start(plan, None if self.gpu_ids is None else plan.gpu_ids(self.pool, self.gpu_ids))

    def _start(self, plan: ReplicaPlan, gpu_ids: Sequence[Sequence[str]] | None) -> None:
        of_nodes = launches(self.launch, plan, gpu_ids)
        single_node = self.host_options["single_node"]
        # Actors of several nodes serve each other alone: their processes are in one process group.
        bound = None if len(of_nodes) == 1 else plan
        specs = [
            ActorSpec(
                ServerHost,
                node,
                len(plan.devices) if self.owns_devices else 0,
                key=(of_node.synced, bound, process_key(of_node, single_node=single_node)),
            )
            for node, of_node in zip(plan.nodes, of_nodes, strict=True)
        ]
        others = [
            self.pool.start(spec, {"max_concurrency": 4}, plan.index, of_node, self.purpose, **self.host_options)
            for spec, of_node in zip(specs[1:], of_nodes[1:], strict=True)
        ]
        host = self.pool.start(
            specs[0],
            {"max_concurrency": 2},
            plan.index,
            of_nodes[0],
            self.purpose,
            first_step=self.first_step,
            others=[pooled.actor for pooled in others],
            **self.host_options,
        )
        self.actors += [host, *others]
        self.hosts.append(host.actor)
        # A host takes calls side by side: all must have joined this run before it starts anything.
        self.starting.append(host.actor.start.remote(*[pooled.ready for pooled in (host, *others)]))

    @property
    def num_restarts(self) -> int:
        """The number of restarts in this run."""
        return sum(self.num_restarts_of.values())

    def wait_ready(self) -> None:
        """Waits until all servers answer.

        Raises ServerStartError with the last log lines of one that does not, or for a smaller KV cache than planned.
        """
        started = values_of(f"{self.purpose.who} start", self.starting, self.timeout_s)
        tp_size = ENGINES[self.config.name].num_ranks(self.config.tensor_model_parallel_size)
        adapter = None if self.launch.adapter is None else POLICY_ADAPTER
        own = self.config.engine_kwargs, quantization_of(self.config), adapter
        self.replicas = [Replica(url, self.config.name, tp_size, key, *own) for url, key in started]
        self.clients = {index: self.settings.client(replica) for index, replica in enumerate(self.replicas)}
        if small := list(small_caches(self.clients, self.config.kv_cache_tokens)):
            raise ServerNotReadyError("\n".join(small))

    def end(self, lost: Mapping[int, str]) -> None:
        """Kills what is left of lost servers, index -> why, side by side; they are down then.

        Raises RolloutError when one may not be restarted.
        """
        ending = [self.hosts[index].end.remote() for index in lost]
        ends = values_of(f"{self.purpose.who} end", ending, self.timeout_s)
        for (index, why), how in zip(lost.items(), ends, strict=True):
            self._count_down(index, f"{self.purpose.who} {index} was lost: {why}\n{how}")

    def end_lost(self, lost: Sequence[LostServer]) -> bool:
        """Ends lost servers that were not replaced or ended meanwhile, as the news of a loss may come late.

        Returns whether any of the lost servers has no successor.
        """
        lost = [server for server in lost if self.replicas[server.index].url == server.url]
        # Several may tell of one; the first reason is the loss.
        whys = {server.index: server.why for server in reversed(lost) if server.index not in self.down}
        if whys:
            self.end(whys)
        return bool(lost)

    def end_failed(self, failed: Mapping[int, str]) -> None:
        """Ends servers that failed, index -> why. Raises RolloutError for one that is well: it would refuse again."""
        if not failed:
            return
        for index, is_well in are_well({index: self.clients[index] for index in sorted(failed)}).items():
            if is_well:
                raise RolloutError(failed[index])
        self.end(failed)

    def restart_down(self) -> dict[int, Replica]:
        """Restarts the servers that are down. Returns index -> successor.

        Warns of one with a smaller KV cache than before: its samples take longer, which is better than no run.
        Raises RolloutError when a server does not start within its restarts.
        """
        restarted = sorted(self.down)
        while self.down:
            starting = {index: self.hosts[index].start.remote() for index in self.down}
            for index, call in starting.items():
                self.num_restarts_of[index] = self.num_restarts_of.get(index, 0) + 1
                nth, limit = self.num_restarts_of[index], self.config.max_restarts
                logger.warning("%s\nRestart %d of at most %d.", self.down[index], nth, limit)
                try:
                    ((url, key),) = values_of(f"{self.purpose.who} restart", [call], self.timeout_s)
                except ServerStartError as error:
                    self._count_down(index, str(error))
                    continue
                del self.down[index]
                self.replicas[index] = replace(self.replicas[index], url=url, key=key)
                self.clients[index] = self.settings.client(self.replicas[index])
        for small in small_caches({i: self.clients[i] for i in restarted}, self.config.kv_cache_tokens):
            logger.warning(small)
        return {index: self.replicas[index] for index in restarted}

    def leave(self) -> None:
        """Makes the servers forget the run; they wait for another, each with its actors."""
        values_of(f"{self.purpose.who} leave", [host.leave.remote() for host in self.hosts], self.timeout_s)
        self.pool.keep(self.actors)

    def stop(self) -> None:
        actors = [pooled.actor for pooled in self.actors]
        stopping = [actor.stop.remote() for actor in actors]
        for actor, call in zip(actors, stopping, strict=True):
            try:
                ray.get(call, timeout=20)
            except Exception as error:
                logger.warning("%s did not stop by itself: %s", self.purpose.who, error)
            ray.kill(actor)

    def _count_down(self, index: int, how: str) -> None:
        used, limit = self.num_restarts_of.get(index, 0), self.config.max_restarts
        if used >= limit:
            raise RolloutError(
                f"{how}\nIt was restarted {used} times in this run, {self.purpose.key('max_restarts')}={limit}; raise "
                "it if the machine is to blame and not the server"
            )
        self.down[index] = how


# --- requests to several servers at the same time ---


def pause(clients: Clients) -> dict[int, str]:
    """Interrupts running samples where they are; they wait. Returns index -> error, of servers that failed."""
    return _failures(RolloutClient.pause, clients)


def continue_generation(clients: Clients) -> dict[int, str]:
    """Continues the samples that `pause` interrupted, with the weights that the server has now. Returns as `pause`."""
    paused = {index: client for index, client in clients.items() if client.paused}
    return _failures(RolloutClient.continue_generation, paused)


def are_well(clients: Clients) -> dict[int, bool]:
    """Whether each server does its work (`RolloutClient.is_well`)."""

    async def ask() -> list[bool]:
        return await asyncio.gather(*(client.is_well() for client in clients.values()))

    return dict(zip(clients, asyncio.run(ask()), strict=True))


def small_caches(clients: Clients, tokens: int | None) -> Iterator[str]:
    """One sentence for each server whose KV cache is smaller than configured; an engine with less memory takes fewer.

    tokens: `kv_cache_tokens`; None: no number was given, and no server is asked.  Raises RolloutError.
    """
    if tokens is None:
        return
    for index, answer in _answers(RolloutClient.cache_size, clients).items():
        size, client = answer.result(), clients[index]
        if size is None:
            continue
        num_tokens, page_tokens = size
        if num_tokens < tokens // page_tokens * page_tokens:
            key = client.purpose.key("kv_cache_tokens")
            yield (
                f"{client.purpose.who} {index} ({client.url}) has a KV cache of {num_tokens} tokens, not the "
                f"{tokens} of the memory plan or of {key}: its device has less free memory than planned. Find what "
                f"else is on it (nvidia-smi), or set {key}={num_tokens}"
            )


def _answers(call: Callable[[RolloutClient], T], clients: Clients) -> dict[int, Future[T]]:
    return {index: in_daemon(partial(call, client), f"server {index}") for index, client in clients.items()}


def _failures(call: Callable[[RolloutClient], None], clients: Clients) -> dict[int, str]:
    failed = {}
    for index, answer in _answers(call, clients).items():
        error = answer.exception()
        if isinstance(error, RolloutError):
            failed[index] = str(error)
        elif error is not None:
            raise error
    return failed
