"""Rules of where the rollout servers live, and of how weights reach them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from scalerl.config.layout_sizes import world_size
from scalerl.config.rules.base import Rule, rule, value_at
from scalerl.config.schema import JudgeConfig, PPOConfig, RolloutConfig
from scalerl.config.sections import HYBRID, ROLLOUT
from scalerl.config.suggestions import divisors, nearest

_POOL = f"{ROLLOUT}.resource_pool"
_TRANSPORT = f"{ROLLOUT}.weight_transport"
_DIRECTORY = f"{ROLLOUT}.weight_transport_dir"
_TP_SIZE = f"{ROLLOUT}.tensor_model_parallel_size"


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
            f"{_POOL}.nnodes=1 or more and {_POOL}.n_gpus_per_node, or {HYBRID}=true"
        )


def own_pool_rule(section: str, has_servers: Callable[[PPOConfig], bool]) -> Rule:
    """Makes the rule that the replicas of a section fit on its own pool, where the run has such servers."""
    tp_key, pool_key = f"{section}.tensor_model_parallel_size", f"{section}.resource_pool"

    @rule(tp_key, f"{section}.num_replicas", f"{pool_key}.nnodes", f"{pool_key}.n_gpus_per_node")
    def replicas_fit(cfg: PPOConfig) -> Iterator[str]:
        servers: RolloutConfig | JudgeConfig = value_at(cfg, section)
        pool, tp_size, count = servers.resource_pool, servers.tensor_model_parallel_size, servers.num_replicas
        if not has_servers(cfg) or not pool.nnodes:
            return
        per_node = pool.n_gpus_per_node // tp_size
        if not per_node:
            yield (
                f"{tp_key} = {tp_size}: a replica lives on one node, so it must be at most {pool_key}.n_gpus_per_node "
                f"= {pool.n_gpus_per_node}; set {tp_key}={pool.n_gpus_per_node} or less, or "
                f"{pool_key}.n_gpus_per_node={tp_size} or more"
            )
        elif count is not None and count > per_node * pool.nnodes:
            yield (
                f"{section}.num_replicas = {count}: the pool of {pool_key}.nnodes x {pool_key}.n_gpus_per_node = "
                f"{pool.nnodes} x {pool.n_gpus_per_node} has room for {per_node * pool.nnodes} replicas of {tp_key} = "
                f"{tp_size}; set {section}.num_replicas={per_node * pool.nnodes} or less, or null"
            )

    return replicas_fit


@rule(_TP_SIZE, f"{ROLLOUT}.num_replicas", "trainer.nnodes", "trainer.n_gpus_per_node")
def _replicas_fit_the_trainer(cfg: PPOConfig) -> Iterator[str]:
    rollout, per_node, world = cfg.actor_rollout_ref.rollout, cfg.trainer.n_gpus_per_node, world_size(cfg)
    tp_size = rollout.tensor_model_parallel_size
    if not cfg.actor_rollout_ref.hybrid_engine:
        return
    if per_node % tp_size:
        yield (
            f"{_TP_SIZE} = {tp_size}: a replica lives on one node, so it must divide "
            f"trainer.n_gpus_per_node = {per_node}; set {_TP_SIZE}={nearest(tp_size, divisors(per_node))}"
        )
    elif rollout.num_replicas is not None and rollout.num_replicas * tp_size > world:
        yield (
            f"{ROLLOUT}.num_replicas = {rollout.num_replicas}: x {_TP_SIZE} = {tp_size} "
            f"must be at most the {world} devices; set {ROLLOUT}.num_replicas={world // tp_size} or less, or null"
        )


@rule(f"{ROLLOUT}.num_workers", _TP_SIZE, f"{ROLLOUT}.num_replicas", f"{_POOL}.nnodes", f"{_POOL}.n_gpus_per_node")
def _workers_have_servers(cfg: PPOConfig) -> Iterator[str]:
    num_workers, num_servers = cfg.actor_rollout_ref.rollout.num_workers, _num_replicas(cfg)
    if num_workers is not None and num_workers > num_servers:
        yield (
            f"{ROLLOUT}.num_workers = {num_workers}: each has servers of its own, there are {num_servers}; set "
            f"{ROLLOUT}.num_workers={num_servers} or less, or null"
        )


def _num_replicas(cfg: PPOConfig) -> int:
    """The number of the policy's servers."""
    rollout = cfg.actor_rollout_ref.rollout
    pool = cfg.trainer if cfg.actor_rollout_ref.hybrid_engine else rollout.resource_pool
    per_node = max(1, pool.n_gpus_per_node // rollout.tensor_model_parallel_size)
    return rollout.num_replicas or per_node * pool.nnodes


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
            f"when {HYBRID} = true; set {_TRANSPORT}=auto or disk, or {HYBRID}=false"
        )


@rule(_TRANSPORT, _DIRECTORY)
def _directory_given(cfg: PPOConfig) -> Iterator[str]:
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.weight_transport == "disk" and rollout.weight_transport_dir is None:
        yield (
            f"{_DIRECTORY} = null: needed when {_TRANSPORT} = disk; set it to a directory that all nodes share, with "
            "room for two copies of the weights"
        )
    if rollout.weight_transport != "disk" and rollout.weight_transport_dir is not None:
        yield (
            f"{_DIRECTORY} = {rollout.weight_transport_dir}: has no effect when {_TRANSPORT} = "
            f"{rollout.weight_transport}; set {_TRANSPORT}=disk, or {_DIRECTORY}=null"
        )


ROLLOUT_RULES = [
    _pool_given,
    own_pool_rule(ROLLOUT, lambda cfg: not cfg.actor_rollout_ref.hybrid_engine),
    _workers_have_servers,
    _transport_reaches,
    _directory_given,
]
# Rules on GPUs only: on a CPU a device is a process, and any number of servers share the machine with the trainer.
ROLLOUT_RULES_ON_CUDA = [_replicas_fit_the_trainer, _no_broadcast_on_one_device]
