"""How evenly the data-parallel ranks of a run share an update, by the packing plan of samples of assumed lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalerl.batch import Alignment, plan_step
from scalerl.config import PPOConfig, SFTConfig, trained_layout
from scalerl.config.layout import longest_sample
from scalerl.models import ModelShape
from scalerl.models.flops import flops_shape


@dataclass(frozen=True)
class UpdateBalance:
    """The operations and tokens of the rank that has the most in an update, in units of the ranks' mean.

    num_micro_batches: of each rank.
    """

    dp_size: int
    num_micro_batches: int
    operations: float
    tokens: float


def full_length_balance(cfg: PPOConfig | SFTConfig, shape: ModelShape) -> UpdateBalance:
    """The balance of an update whose samples all have the greatest length."""
    longest = longest_sample(cfg) if isinstance(cfg, PPOConfig) else cfg.data.max_length
    return _balance(cfg, shape, np.full(_num_samples(cfg), longest))


def spread_balance(cfg: PPOConfig | SFTConfig, shape: ModelShape) -> UpdateBalance:
    """The balance of an update whose samples' lengths are spread evenly, up to the greatest."""
    longest, num_samples = longest_sample(cfg) if isinstance(cfg, PPOConfig) else cfg.data.max_length, _num_samples(cfg)
    return _balance(cfg, shape, np.ceil(np.arange(1, num_samples + 1) / num_samples * longest).astype(np.int64))


def _num_samples(cfg: PPOConfig | SFTConfig) -> int:
    if isinstance(cfg, SFTConfig):
        return cfg.data.train_batch_size
    return cfg.actor_rollout_ref.actor.ppo_mini_batch_size * cfg.actor_rollout_ref.rollout.n


def _balance(cfg: PPOConfig | SFTConfig, shape: ModelShape, num_tokens_S: np.ndarray) -> UpdateBalance:
    layout = trained_layout(cfg)
    if isinstance(cfg, SFTConfig):
        megatron, max_tokens_per_micro_batch = cfg.megatron, cfg.data.max_tokens_per_micro_batch
    else:
        actor = cfg.actor_rollout_ref.actor
        megatron, max_tokens_per_micro_batch = actor.megatron, actor.max_tokens_per_micro_batch
    workload_S = flops_shape(shape).forward_each(num_tokens_S)
    plan = plan_step(
        num_tokens_S,
        dp_size=layout.dp_size,
        mini_batches=[range(len(num_tokens_S))],
        max_tokens_per_micro_batch=max_tokens_per_micro_batch,
        workload_S=workload_S,
        micro_batch_multiple=layout.micro_batch_multiple,
        alignment=Alignment.of_layout(
            tp_size=layout.tp_size, cp_size=layout.cp_size, sequence_parallel=megatron.sequence_parallel
        ),
    )
    ranks = [list(plan.rows(rank)) for rank in range(layout.dp_size)]
    operations, tokens = (
        max(float(cost_S[rows].sum()) for rows in ranks) * len(ranks) / float(cost_S.sum())
        for cost_S in (np.asarray(workload_S), num_tokens_S)
    )
    return UpdateBalance(layout.dp_size, plan.num_micro_batches[0], operations, tokens)
