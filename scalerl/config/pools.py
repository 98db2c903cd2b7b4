"""The devices of a run: those of the trainer and the layout on them, and the pools of roles and servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scalerl.config.layout import LayoutSizes
from scalerl.config.names import JUDGE, ROLLOUT
from scalerl.config.roles import model_roles
from scalerl.config.schema import GenerationConfig, MegatronConfig, PPOConfig, SFTConfig


def world_size(cfg: PPOConfig | SFTConfig) -> int:
    """The number of the trainer's devices; on CPU, of its processes."""
    return cfg.trainer.num_devices


def trained_megatron(cfg: PPOConfig | SFTConfig) -> MegatronConfig:
    """The `megatron` section of the model that the program trains; with PPO, of the actor."""
    return cfg.megatron if isinstance(cfg, SFTConfig) else cfg.actor_rollout_ref.actor.megatron


def trained_layout(cfg: PPOConfig | SFTConfig) -> LayoutSizes:
    """The layout of the model that the program trains; with PPO, of the actor."""
    return LayoutSizes.of(trained_megatron(cfg), world_size(cfg))


@dataclass(frozen=True)
class Pool:
    """Nodes that belong together in a run.  section: the section whose keys size the pool."""

    section: str
    nnodes: int
    n_gpus_per_node: int


def pools_of(cfg: PPOConfig | SFTConfig | GenerationConfig) -> Iterator[Pool]:
    """Yields the pools of a run, the trainer's first."""
    yield Pool("trainer", cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node)
    if not isinstance(cfg, PPOConfig):
        return
    judge = cfg.reward_model.judge
    own = {
        f"{ROLLOUT}.resource_pool": None if cfg.actor_rollout_ref.hybrid_engine else cfg.actor_rollout_ref.rollout,
        f"{JUDGE}.resource_pool": judge if judge.enable and judge.resource_pool.nnodes else None,
    }
    for section, servers in own.items():
        if servers is not None:
            yield Pool(section, servers.resource_pool.nnodes, servers.resource_pool.n_gpus_per_node)
    for role in model_roles(cfg):
        if role.has_own_pool:
            yield Pool(f"{role.section}.resource_pool", role.pool.nnodes, role.pool.n_gpus_per_node)


def num_devices(cfg: PPOConfig) -> int:
    """The number of devices of all pools of the run; on CPU, of processes."""
    return sum(pool.nnodes * pool.n_gpus_per_node for pool in pools_of(cfg))
