"""Rules of where the rollout servers live, and of how weights reach them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from scalerl.config.layout_sizes import world_size
from scalerl.config.replicas import ReplicaRoom, num_replicas, replica_size_violations, room_of_servers
from scalerl.config.rules.base import Rule, rule, value_at
from scalerl.config.schema import JudgeConfig, PPOConfig, RolloutConfig
from scalerl.config.sections import HYBRID, ROLLOUT

_POOL = f"{ROLLOUT}.resource_pool"
_TRANSPORT = f"{ROLLOUT}.weight_transport"
_DIRECTORY = f"{ROLLOUT}.weight_transport_dir"
_TP_SIZE = f"{ROLLOUT}.tensor_model_parallel_size"
_VERIFY = f"{ROLLOUT}.verify_weights_every"
_NODES_OF_TRAINER = ("trainer.nnodes", "trainer.n_gpus_per_node")
_NODES_OF_POOL = (f"{_POOL}.nnodes", f"{_POOL}.n_gpus_per_node")
_ON_THE_TRAINER = (f"{ROLLOUT}.name", _TP_SIZE, f"{ROLLOUT}.num_replicas", *_NODES_OF_TRAINER)


@rule(f"{_POOL}.nnodes")
def _pool_given(cfg: PPOConfig) -> Iterator[str]:
    pool, hybrid = cfg.actor_rollout_ref.rollout.resource_pool, cfg.actor_rollout_ref.hybrid_engine
    if hybrid and pool.nnodes:
        yield (
            f"{_POOL}.nnodes = {pool.nnodes}: has no effect when {HYBRID} = true, the servers are on the trainer's "
            f"devices; set {HYBRID}=false, or {_POOL}.nnodes=0"
        )
    if not hybrid and not pool.nnodes:
        yield (
            f"{_POOL}.nnodes = 0: needed when {HYBRID} = false, the servers have devices of their own; set "
            f"{_POOL}.nnodes=1 and {_POOL}.n_gpus_per_node={pool.n_gpus_per_node}, or more of them, or {HYBRID}=true"
        )


def own_pool_rule(section: str, has_servers: Callable[[PPOConfig], bool]) -> Rule:
    """Makes the rule that the replicas of a section fit on its own pool, where the run has such servers."""
    tp_key, pool_key = f"{section}.tensor_model_parallel_size", f"{section}.resource_pool"
    nodes = (f"{pool_key}.nnodes", f"{pool_key}.n_gpus_per_node")

    @rule(f"{section}.name", tp_key, f"{section}.num_replicas", *nodes)
    def replicas_fit(cfg: PPOConfig) -> Iterator[str]:
        servers: RolloutConfig | JudgeConfig = value_at(cfg, section)
        pool, count = servers.resource_pool, servers.num_replicas
        if not has_servers(cfg) or not pool.nnodes:
            return
        room = ReplicaRoom(pool.nnodes, pool.n_gpus_per_node, servers.tensor_model_parallel_size)
        yield from replica_size_violations(servers, section, room, nodes)
        if count is not None and 0 < room.num_replicas < count:
            yield (
                f"{section}.num_replicas = {count}: the pool of {pool_key}.nnodes x {pool_key}.n_gpus_per_node = "
                f"{pool.nnodes} x {pool.n_gpus_per_node} has room for {room.num_replicas} replicas of {tp_key} = "
                f"{room.tp_size}; set {section}.num_replicas={room.num_replicas} or less, or null"
            )

    return replicas_fit


@rule(*_ON_THE_TRAINER)
def _replicas_on_nodes_of_the_trainer(cfg: PPOConfig) -> Iterator[str]:
    """Checks replicas on several nodes of the trainer, on any device: an engine rank is fed by a rank on its node."""
    if cfg.actor_rollout_ref.hybrid_engine and cfg.trainer.nnodes > 1:
        yield from _sizes_on_the_trainer(cfg)
        if room_of_servers(cfg).nodes_each > 1:
            yield from _count_on_the_trainer(cfg)


@rule(*_ON_THE_TRAINER)
def _replicas_fit_the_trainer(cfg: PPOConfig) -> Iterator[str]:
    if not cfg.actor_rollout_ref.hybrid_engine:
        return
    if cfg.trainer.nnodes == 1:
        yield from _sizes_on_the_trainer(cfg)
    if room_of_servers(cfg).nodes_each == 1 and not any(_sizes_on_the_trainer(cfg)):
        yield from _count_on_the_trainer(cfg)


def _sizes_on_the_trainer(cfg: PPOConfig) -> Iterator[str]:
    rollout = cfg.actor_rollout_ref.rollout
    yield from replica_size_violations(rollout, ROLLOUT, room_of_servers(cfg), _NODES_OF_TRAINER, fills_nodes=True)


def _count_on_the_trainer(cfg: PPOConfig) -> Iterator[str]:
    count, room = cfg.actor_rollout_ref.rollout.num_replicas, room_of_servers(cfg)
    if count is not None and count > room.num_replicas:
        yield (
            f"{ROLLOUT}.num_replicas = {count}: x {_TP_SIZE} = {room.tp_size} must be at most the {world_size(cfg)} "
            f"devices; set {ROLLOUT}.num_replicas={room.num_replicas} or less, or null"
        )


@rule(f"{ROLLOUT}.num_workers", _TP_SIZE, f"{ROLLOUT}.num_replicas", *_NODES_OF_TRAINER, *_NODES_OF_POOL)
def _workers_have_servers(cfg: PPOConfig) -> Iterator[str]:
    num_workers, num_servers = cfg.actor_rollout_ref.rollout.num_workers, num_replicas(cfg)
    if num_workers is not None and num_workers > num_servers:
        yield (
            f"{ROLLOUT}.num_workers = {num_workers}: each has servers of its own, there are {num_servers}; set "
            f"{ROLLOUT}.num_workers={num_servers} or less, or null"
        )


@rule(_TRANSPORT)
def _transport_reaches(cfg: PPOConfig) -> Iterator[str]:
    transport = cfg.actor_rollout_ref.rollout.weight_transport
    if transport == "shared" and not cfg.actor_rollout_ref.hybrid_engine:
        yield (
            f"{_TRANSPORT} = shared: trainer and servers share memory only where they share devices, {HYBRID} = false; "
            f"set {_TRANSPORT}=auto, broadcast or disk"
        )


@rule(_TRANSPORT)
def _no_broadcast_on_one_device(cfg: PPOConfig) -> Iterator[str]:
    if cfg.actor_rollout_ref.rollout.weight_transport == "broadcast" and cfg.actor_rollout_ref.hybrid_engine:
        yield (
            f"{_TRANSPORT} = broadcast: NCCL does not send between processes on one GPU, where trainer and servers are "
            f"when {HYBRID} = true; set {_TRANSPORT}=auto or disk, or {HYBRID}=false and {_POOL}.nnodes=1"
        )


@rule(_TRANSPORT, _DIRECTORY)
def _directory_given(cfg: PPOConfig) -> Iterator[str]:
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.weight_transport == "disk" and rollout.weight_transport_dir is None:
        yield (
            f"{_DIRECTORY} = null: needed when {_TRANSPORT} = disk; set {_DIRECTORY}={cfg.trainer.default_local_dir}, "
            "or another directory that all nodes share, with room for two copies of the weights"
        )
    if rollout.weight_transport != "disk" and rollout.weight_transport_dir is not None:
        yield (
            f"{_DIRECTORY} = {rollout.weight_transport_dir}: has no effect when {_TRANSPORT} = "
            f"{rollout.weight_transport}; set {_TRANSPORT}=disk, or {_DIRECTORY}=null"
        )


@rule(_TRANSPORT, _TP_SIZE, _VERIFY, *_NODES_OF_TRAINER, *_NODES_OF_POOL)
def _files_are_read_on_every_node(cfg: PPOConfig) -> Iterator[str]:
    rollout, nodes = cfg.actor_rollout_ref.rollout, room_of_servers(cfg).nodes_each
    if rollout.weight_transport == "disk" and nodes > 1 and rollout.verify_weights_every != 1:
        yield (
            f"{_VERIFY} = {rollout.verify_weights_every}: must be 1 when {_TRANSPORT} = disk and a replica is on "
            f"{nodes} nodes ({_TP_SIZE} = {rollout.tensor_model_parallel_size}): SGLang says what its first node has "
            f"read, and another that could not read the files keeps its old weights; set {_VERIFY}=1, or "
            f"{_TRANSPORT}=auto"
        )


ROLLOUT_RULES = [
    _pool_given,
    own_pool_rule(ROLLOUT, lambda cfg: not cfg.actor_rollout_ref.hybrid_engine),
    _replicas_on_nodes_of_the_trainer,
    _workers_have_servers,
    _transport_reaches,
    _directory_given,
    _files_are_read_on_every_node,
]
# Rules on GPUs only: on a CPU a device is a process, and any number of servers share the machine with the trainer.
ROLLOUT_RULES_ON_CUDA = [_replicas_fit_the_trainer, _no_broadcast_on_one_device]
