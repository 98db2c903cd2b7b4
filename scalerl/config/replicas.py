"""Nodes and devices of replicas: which sizes a pool has room for, and on how many nodes a replica is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scalerl.config.rollout_engines import engines_with, traits_of
from scalerl.config.schema import PPOConfig, ServerConfig
from scalerl.config.suggestions import divisors, nearest


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
    """The room for the policy's servers: the trainer's devices, or a pool of their own."""
    rollout = cfg.actor_rollout_ref.rollout
    pool = cfg.trainer if cfg.actor_rollout_ref.hybrid_engine else rollout.resource_pool
    return ReplicaRoom(pool.nnodes, pool.n_gpus_per_node, rollout.tensor_model_parallel_size)


def num_replicas(cfg: PPOConfig) -> int:
    """The number of the policy's servers."""
    return room_of_servers(cfg).planned(cfg.actor_rollout_ref.rollout.num_replicas)


def replica_size_violations(
    servers: ServerConfig, section: str, room: ReplicaRoom, keys: tuple[str, str], *, fills_nodes: bool = False
) -> Iterator[str]:
    """Yields what is wrong with the size of a section's replicas.

    keys: those of room.nnodes and room.devices_per_node.
    fills_nodes: no device of a node may be left over.
    """
    key, (nnodes_key, per_node_key) = f"{section}.tensor_model_parallel_size", keys
    per_node = room.devices_per_node
    parts = divisors(per_node) if fills_nodes else list(range(1, per_node + 1))
    wholes = [per_node * nodes for nodes in range(2, room.nnodes + 1)]
    if room.tp_size not in parts + wholes:
        limit = f"{'divide' if fills_nodes else 'be at most'} {per_node_key} = {per_node}"
        limit += f" or be a multiple of it, on at most {nnodes_key} = {room.nnodes} node{'s' * (room.nnodes > 1)}"
        advice = f"set {key}={nearest(room.tp_size, parts + wholes)}"
        if room.tp_size % per_node == 0:
            advice += f", or {nnodes_key}={room.tp_size // per_node} or more"
        yield f"{key} = {room.tp_size}: a replica is on one node or on whole nodes, so it must {limit}; {advice}"
    elif room.nodes_each > 1 and not traits_of(servers.name).spans_nodes:
        names = engines_with(lambda traits: traits.spans_nodes)
        yield (
            f"{section}.name = {servers.name}: a replica on {room.nodes_each} nodes ({key} = {room.tp_size}) needs a "
            f"process on each, as {names} has; set {section}.name={names}, or {key}={per_node} or less"
        )
