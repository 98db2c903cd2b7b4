"""The Ray cluster, and the pools of devices that actors run on."""

from __future__ import annotations

import gc
import logging
import os
import re
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from scalerl.base.process import worker_environment
from scalerl.cluster.ray_hook import REGISTER_MS, wait_for_no_agent
from scalerl.cluster.ray_session import (
    own_token,
    session_directory,
    sessions_parent,
    sigterm_kept,
    start_explained,
    wait_for_head,
)
from scalerl.cluster.worker_logs import logs_are_kept_in
from scalerl.errors import RunError

logger = logging.getLogger(__name__)


class ResourceError(RunError):
    """The cluster does not have what the configuration asks for."""


@contextmanager
def ray_cluster(*, num_workers: int, device: str, log_dir: Path | None = None) -> Iterator[None]:
    """Joins the cluster at RAY_ADDRESS, or starts one on this machine; leaves (and ends the local one) on exit.

    log_dir: the run's; if the block fails its ray/ gets the logs of a local cluster, of which nothing else is kept.
    Raises RayStartError where there is no cluster then.
    """
    common: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "include_dashboard": False,
        "runtime_env": {"env_vars": worker_environment(device, os.environ)},
        "namespace": "scalerl",
    }
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A Python process for each core, which no actor ever takes: each actor has another environment.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Ray's own is 15: behind any other program of the machine a rank would have a thirtieth of a core, and with it all
    # ranks that wait for that one.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_agent_register_timeout_ms", str(REGISTER_MS))
    # The first rank's error is raised with its cause; Ray would also print a stack for every other rank.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    address, parent = os.environ.get("RAY_ADDRESS") or None, sessions_parent()
    logs_to = None if address or log_dir is None else log_dir.absolute() / "ray"
    with ExitStack() as stack:
        with start_explained(parent, logs_to, address):
            if address:
                wait_for_head(address)
                common.pop("include_dashboard")
            else:
                common["_temp_dir"] = str(stack.enter_context(session_directory(logs_to, parent)))
                stack.callback(logs_are_kept_in, None)
                logs_are_kept_in(logs_to)
                stack.enter_context(own_token())
                # "local": a cluster that someone else started on this machine is not ours to use.
                common |= {"address": "local", "object_store_memory": _object_store_bytes()}
                # No actor asks for memory by number. Without one Ray takes what is free, and refuses where that is
                # little.
                common["_memory"] = _machine_bytes()
                # On CPU a rank is a process, so the machine has as many places as the configuration asks for.
                common["num_cpus"] = max(os.cpu_count() or 1, num_workers) if device == "cpu" else None
            # Before the start, which may be interrupted.
            stack.callback(ray.shutdown)
            with sigterm_kept(), ExitStack() as start:
                start.callback(wait_for_no_agent())
                ray.init(**common)
        yield


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _object_store_bytes() -> int:
    """A quarter of the machine's memory and at most half of /dev/shm (Ray spills to disk beyond)."""
    shm = os.statvfs("/dev/shm")
    return max(100 * 2**20, min(_machine_bytes() // 4, shm.f_bavail * shm.f_frsize // 2, 32 * 2**30))


class Reusable:
    """Base class of actors whose process may serve several runs, one after another."""

    def enter(self, *args: Any, **kwargs: Any) -> None:
        """Makes this object a new one of its class, in the same process, for the next run."""
        vars(self).clear()
        self.__init__(*args, **kwargs)

    def leave(self) -> None:
        """Ends what the run began in this process, and keeps nothing of it."""
        vars(self).clear()
        gc.collect()


@dataclass(frozen=True)
class ActorSpec:
    """What actors must have in common for one to serve in the place of another.

    node: index of a node in the pool.  num_devices: taken on that node.  key: what its process was started with.
    """

    cls: type[Reusable]
    node: int
    num_devices: float
    key: Hashable = None


@dataclass(frozen=True)
class PooledActor:
    """An actor that serves a run. ready: resolves when the object is made; raises what its constructor raised."""

    actor: ActorHandle
    ready: ray.ObjectRef
    spec: ActorSpec


# Idle actors without a device that are kept per class and node: nothing else bounds their number.
MAX_IDLE = 4
ANSWER_TIMEOUT_S = 10.0
POLL_S = 0.2
# Free devices are there within the first seconds; a run that waits longer says so, then again and again.
SILENT_S, TOLD_EVERY_S = 10.0, 60.0


def _shown(resources: Mapping[str, float]) -> str:
    """CPUs and GPUs as text."""
    return " and ".join(f"{resources[name]:g} {name}" for name in ("GPU", "CPU") if name in resources) or "nothing"


def _nodes_now() -> str:
    """The nodes of the cluster, with all that each has."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return f"{len(nodes)}: " + ", ".join(f"{node['NodeName']} ({_shown(node['Resources'])})" for node in nodes)


# A label of Ray's nodes: where a node is in the network, from the outermost switch inwards. The launcher sets it.
TOPOLOGY_LABEL = "scalerl-topology"


def in_network_order(nodes: Sequence[Mapping[str, Any]]) -> list[int]:
    """Orders nodes so that neighbours in the network are neighbours; returns their indices.

    nodes: as of `ray.nodes()`.  Without a place in the network a node's name counts, and the numbers in it as numbers.
    """

    def place(index: int) -> list[tuple[bool, int, str]]:
        text = nodes[index]["Labels"].get(TOPOLOGY_LABEL) or nodes[index]["NodeName"]
        parts = re.findall(r"\d+|\D", text)
        return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]

    return sorted(range(len(nodes)), key=place)


@dataclass(frozen=True)
class ResourcePool:
    """Devices reserved in the Ray cluster: nnodes bundles of devices_per_node devices each, one bundle per node.

    bundles: of the nodes of the pool, in their order in the network.
    """

    group: PlacementGroup
    nnodes: int
    devices_per_node: int
    device: str
    bundles: Sequence[int]
    # Idle actors that earlier runs left, the longest unused first.
    idle: list[tuple[ActorSpec, ActorHandle]] = field(default_factory=list, compare=False)

    @classmethod
    def create(
        cls, *, nnodes: int, devices_per_node: int, device: str, timeout_s: float, section: str = "trainer"
    ) -> ResourcePool:
        """Reserves the devices. Raises ResourceError when the cluster has not given them within timeout_s.

        section: of the configuration that asks for the pool, for the error.
        """
        bundle = {"CPU": float(devices_per_node)}
        if device == "cuda":
            bundle["GPU"] = float(devices_per_node)
        group = placement_group([bundle] * nnodes, strategy="STRICT_SPREAD" if nnodes > 1 else "PACK")
        keys = f"{section}.nnodes and {section}.n_gpus_per_node"
        wanted = f"{nnodes} {'node' if nnodes == 1 else 'nodes'} with {_shown(bundle)} free each"
        deadline, told_after_s = time.monotonic() + timeout_s, SILENT_S
        while not ray.wait([group.ready()], timeout=max(0.0, min(told_after_s, deadline - time.monotonic())))[0]:
            if time.monotonic() >= deadline:
                remove_placement_group(group)
                raise ResourceError(
                    f"no {wanted} within {timeout_s:.0f} s; the cluster has {_nodes_now()}. Set {keys} to what is there"
                )
            logger.warning(
                "waiting for %s (%s), for %.0f s at most; the cluster has %s. A machine joins it with: ray start "
                "--address=%s",
                *(wanted, keys, deadline - time.monotonic(), _nodes_now(), ray.get_runtime_context().gcs_address),
            )
            told_after_s = TOLD_EVERY_S
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        places = placement_group_table(group)["bundles_to_node_id"]
        bundles = in_network_order([nodes[places[bundle]] for bundle in range(nnodes)])
        return cls(group, nnodes, devices_per_node, device, bundles)

    @property
    def world_size(self) -> int:
        return self.nnodes * self.devices_per_node

    def place(self, node: int, *, num_devices: float) -> dict:
        """Ray options for an actor on that node's bundle.  node: index of a node in the pool."""
        return {
            "num_cpus": num_devices,
            "num_gpus": num_devices if self.device == "cuda" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self.bundles[node]
            ),
        }

    def node_ids(self) -> set[str]:
        """Ray's ids of the nodes that the pool is on."""
        return set(placement_group_table(self.group)["bundles_to_node_id"].values())

    def is_whole(self, timeout_s: float) -> bool:
        """Whether every node of the pool answers; Ray has timeout_s to put another in the place of a lost one."""
        deadline = time.monotonic() + timeout_s
        while not self._all_answer(deadline):
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def _all_answer(self, deadline: float) -> bool:
        entry = placement_group_table(self.group)
        nodes = set(entry["bundles_to_node_id"].values())
        if entry["state"] != "CREATED" or not nodes <= {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
            return False
        # A node that has just gone may still be called alive; its task ends with an error when Ray knows better.
        asked = [_beginning_on(node) for node in nodes - {ray.get_runtime_context().get_node_id()}]
        if not asked:
            return True
        answered, silent = ray.wait(asked, num_returns=len(asked), timeout=max(0.0, deadline - time.monotonic()))
        try:
            ray.get(answered)
        except RayError:
            return False
        return not silent

    def first(self, devices_per_node: int) -> ResourcePool:
        """The same pool, limited to this many devices of each node."""
        return replace(self, devices_per_node=devices_per_node)

    def start(self, spec: ActorSpec, options: dict[str, Any], *args: Any, **kwargs: Any) -> PooledActor:
        """Makes `spec.cls(*args, **kwargs)` in the process of an idle actor with the same spec, or in a new process.

        options: further Ray options for a new process.
        """
        for entry in [entry for entry in reversed(self.idle) if entry[0] == spec]:
            self.idle.remove(entry)
            if _answers(entry[1]):
                return PooledActor(entry[1], entry[1].enter.remote(*args, **kwargs), spec)
        if spec.num_devices:
            # Idle actors of other classes may hold the devices.
            self._end_idle(lambda held: held.node == spec.node and held.num_devices > 0 and held.cls is not spec.cls)
        new = ray.remote(spec.cls).options(**self.place(spec.node, num_devices=spec.num_devices), **options)
        # Ray's types know neither what its actors are at run time nor what every one of them has.
        actor: Any = new.remote(*args, **kwargs)
        return PooledActor(actor, actor.__ray_ready__.remote(), spec)

    def keep(self, actors: Iterable[PooledActor]) -> None:
        """Keeps actors that left their run for the next run."""
        for pooled in actors:
            spec = pooled.spec
            self.idle.append((spec, pooled.actor))
            alike = [entry for entry in self.idle if (entry[0].cls, entry[0].node) == (spec.cls, spec.node)]
            if not spec.num_devices and len(alike) > MAX_IDLE:
                self.idle.remove(alike[0])
                ray.kill(alike[0][1])

    def _end_idle(self, which: Callable[[ActorSpec], bool]) -> None:
        ended = [entry for entry in self.idle if which(entry[0])]
        for entry in ended:
            self.idle.remove(entry)
            ray.kill(entry[1])

    def release(self) -> None:
        """Ends the idle actors and gives the devices back to Ray."""
        self._end_idle(lambda spec: True)
        remove_placement_group(self.group)


def are_here(*pools: ResourcePool) -> bool:
    """Whether all the pools are on the node of this process and nowhere else."""
    return set[str]().union(*(pool.node_ids() for pool in pools)) == {ray.get_runtime_context().get_node_id()}


def _beginning_on(node: str) -> ray.ObjectRef:
    """Begins a task that does nothing on a node; its result shows that the node answers."""
    remote: Any = ray.remote(num_cpus=0)(_nothing)
    return remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()


def _nothing() -> None: ...


def _answers(actor: ActorHandle) -> bool:
    """Whether an idle actor still answers: its process may have been killed meanwhile."""
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=ANSWER_TIMEOUT_S)
    except (RayActorError, OutOfMemoryError, GetTimeoutError):
        return False
    return True
