"""The servers that generate: their engines, how many fit on which devices, and how weights reach them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from scalerl.config.suggestions import divisors, nearest

if TYPE_CHECKING:
    from scalerl.config.schema import PPOConfig, ServerConfig

TransportName = Literal["shared", "broadcast", "disk"]


@dataclass(frozen=True)
class EngineTraits:
    """The properties of a rollout engine that are asked before, or without, its code.

    spans_nodes: one server may have ranks on several nodes.
    compiles_kernels: on a GPU its servers compile kernels, so each node needs nvcc and ninja.
    repeats_draws: a sample's tokens follow from its seed and the weights, so that a resumed run has the same ones.
    answers_openai: its server has OpenAI's API too, so that `scalerl serve` can run it; the first such engine is taken.
    returns_experts: its servers say which experts their routers chose (algorithm.routing_replay).
    computes_in_fp8: it has kernels for weights of 8 bits (rollout.quantization).
    loads_adapters: its servers add an adapter to what the model computes (model.lora_rank): no sync has to merge them.
    """

    spans_nodes: bool = False
    compiles_kernels: bool = False
    repeats_draws: bool = False
    answers_openai: bool = False
    returns_experts: bool = False
    computes_in_fp8: bool = False
    loads_adapters: bool = False


# The value of rollout.name, which is also the module of `rollout.servers.engines` with its `ENGINE` -> traits.
ROLLOUT_ENGINES = {
    "sglang": EngineTraits(
        spans_nodes=True,
        compiles_kernels=True,
        answers_openai=True,
        returns_experts=True,
        computes_in_fp8=True,
        loads_adapters=True,
    ),
    "embedded": EngineTraits(repeats_draws=True),
}


def traits_of(name: str) -> EngineTraits:
    """The traits of an engine; none for an unknown name, which the domain of its key reports."""
    return ROLLOUT_ENGINES.get(name, EngineTraits())


def quantization_of(config: ServerConfig) -> str | None:
    """rollout.quantization, of the policy's servers; None of others, whose weights are those of the files."""
    return getattr(config, "quantization", None)


def engines_with(has: Callable[[EngineTraits], bool]) -> str:
    """The names of the engines with a trait, for an error that says what to set: "a or b"."""
    return " or ".join(name for name, traits in ROLLOUT_ENGINES.items() if has(traits))


@dataclass(frozen=True)
class ReplicaRoom:
    """The room of a pool of nnodes x devices_per_node devices for replicas of tp_size devices each.

    A replica is on devices of one node, or on whole nodes that are neighbours.
    """

    nnodes: int
    devices_per_node: int
    tp_size: int

    @property
    def nodes_each(self) -> int:
        """The nodes of one replica; 1 for a replica that needs more nodes than there are, or a part of one."""
        nodes, rest = divmod(self.tp_size, self.devices_per_node)
        return 1 if rest or not 1 <= nodes <= self.nnodes else nodes

    @property
    def devices_each(self) -> int:
        """The devices of one replica on each of its nodes."""
        return self.tp_size // self.nodes_each

    @property
    def num_replicas(self) -> int:
        """The number of replicas for which there is room; 0 for replicas that are too large."""
        return self.nnodes // self.nodes_each * (self.devices_per_node // self.devices_each)

    def planned(self, num_replicas: int | None) -> int:
        """The number of replicas that a run has.  num_replicas: the configured number; None: as many as have room.

        On a CPU there is one even where it is larger than the pool.
        """
        return num_replicas or max(self.num_replicas, 1)


def room_of_servers(cfg: PPOConfig) -> ReplicaRoom:
    """The room for the policy's servers: the trainer's devices, or those of rollout.resource_pool."""
    rollout = cfg.actor_rollout_ref.rollout
    pool = cfg.trainer if cfg.actor_rollout_ref.hybrid_engine else rollout.resource_pool
    return ReplicaRoom(pool.nnodes, pool.n_gpus_per_node, rollout.tensor_model_parallel_size)


def num_replicas(cfg: PPOConfig) -> int:
    """The number of the policy's servers."""
    return room_of_servers(cfg).planned(cfg.actor_rollout_ref.rollout.num_replicas)


def replica_violations(
    servers: ServerConfig,
    section: str,
    room: ReplicaRoom,
    pool: str,
    *,
    fills_nodes: bool = False,
    counts: bool = True,
) -> Iterator[str]:
    """Yields the violation of a section's replicas that do not fit on their devices, by size or by number.

    section, pool: the dotted sections of the servers and of room.nnodes and room.devices_per_node.
    fills_nodes: no device of a node may be left over.  counts: the number of replicas is limited, too.
    """
    key, per_node = f"{section}.tensor_model_parallel_size", room.devices_per_node
    parts = divisors(per_node) if fills_nodes else list(range(1, per_node + 1))
    wholes = [per_node * nodes for nodes in range(2, room.nnodes + 1)]
    count = servers.num_replicas
    if room.tp_size not in parts + wholes:
        limit = f"{'divide' if fills_nodes else 'be at most'} {pool}.n_gpus_per_node = {per_node}"
        limit += f" or be a multiple of it, on at most {pool}.nnodes = {room.nnodes} node{'s' * (room.nnodes > 1)}"
        advice = f"set {key}={nearest(room.tp_size, parts + wholes)}"
        if room.tp_size % per_node == 0:
            advice += f", or {pool}.nnodes={room.tp_size // per_node} or more"
        yield f"{key} = {room.tp_size}: a replica is on one node or on whole nodes, so it must {limit}; {advice}"
    elif room.nodes_each > 1 and not traits_of(servers.name).spans_nodes:
        names = engines_with(lambda traits: traits.spans_nodes)
        yield (
            f"{section}.name = {servers.name}: a replica on {room.nodes_each} nodes ({key} = {room.tp_size}) needs a "
            f"process on each, as {names} has; set {section}.name={names}, or {key}={per_node} or less"
        )
    elif counts and count is not None and count > room.num_replicas:
        yield (
            f"{section}.num_replicas = {count}: {pool}.nnodes x {pool}.n_gpus_per_node = {room.nnodes} x {per_node} "
            f"devices have room for {room.num_replicas} of {key} = {room.tp_size}; set "
            f"{section}.num_replicas={room.num_replicas} or less, or null"
        )


def sends_adapter(cfg: PPOConfig) -> bool:
    """Whether the servers get the policy's adapter alone, beside the model of its files."""
    model = cfg.actor_rollout_ref.model
    loads = traits_of(cfg.actor_rollout_ref.rollout.name).loads_adapters
    return model.lora_rank > 0 and not model.lora.merge and loads


def transport_of(cfg: PPOConfig) -> TransportName:
    """The weight transport of a run, with auto replaced by what it stands for."""
    transport = cfg.actor_rollout_ref.rollout.weight_transport
    if transport != "auto":
        return cast("TransportName", transport)
    return "shared" if cfg.actor_rollout_ref.hybrid_engine else "broadcast"


def weight_directory(shared: str | Path, run_dir: str | Path) -> Path:
    """The directory, below a shared one, for weights of the run that writes run_dir; a resumed run has the same."""
    run = Path(run_dir).absolute()
    return Path(shared).expanduser().absolute() / f"{run.name}-{hashlib.sha256(str(run).encode()).hexdigest()[:12]}"
