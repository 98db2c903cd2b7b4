"""Rewards and advantages of single tokens on one data-parallel rank, and the tokens that a loss singles out.

S rows, T tokens. The shard holds whole samples; `group` are the data-parallel ranks, all of which call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from scalerl.algorithms import (
    get_adv_estimator,
    kl_penalty_forward,
    rewards_at_last_token,
    select_tokens,
    token_keys,
    whiten_selected,
)
from scalerl.algorithms.advantages import TURN_INDEX
from scalerl.batch.columns import (
    OLD_LOGPROBS,
    PROMPT_UID,
    REF_LOGPROBS,
    RESPONSE_MASK,
    RETURNS,
    REWARD_AFTER,
    REWARD_FAILED,
    REWARDS,
    SAMPLE_INDEX,
    TOKEN_ADVANTAGES,
    TRAJECTORY_INDEX,
    TURN_ADVANTAGES,
    TURN_REWARDS,
    TURNS_BEFORE,
    UID,
    VALUES,
    Column,
)
from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.batch.turns import Turns
from scalerl.config.schema import AlgorithmConfig, PolicyLossConfig
from scalerl.tracking.metrics import Metric, explained_variance_sums, token_stat_sums

# What names a row on every layout.
ROW_NAMES = (PROMPT_UID, UID, SAMPLE_INDEX, TRAJECTORY_INDEX)


def reward_kl(shard: DataProto, kind: str, *, old_logprobs: Column[Jagged]) -> Jagged:
    """KL of each sampled token to the reference, 0 at the others.

    old_logprobs: the column with the policy's log-probs.
    """
    mask, old, ref = shard[RESPONSE_MASK], shard[old_logprobs], shard[REF_LOGPROBS]
    kl_T = kl_penalty_forward(old.values, ref.values, kind)
    return Jagged(torch.where(mask.values != 0, kl_T, 0.0), mask.cu_seqlens)


def sums_of_rows(column: Jagged) -> np.ndarray:
    """The sum of each row, [S] float64."""
    before = torch.cat([torch.zeros(1, dtype=torch.float64), column.values.double().cumsum(0)])
    return before[column.cu_seqlens].diff().numpy()


def token_advantages(
    shard: DataProto,
    config: AlgorithmConfig,
    kl: tuple[float, Column[Jagged]] | None,
    *,
    group: dist.ProcessGroup,
    device: str,
) -> tuple[dict[str, Metric], DataProto]:
    """Computes columns advantages and returns by an estimator of single tokens, and metrics to merge over the group.

    A turn's reward is that of its last token, and what comes after a row's turns that of its last one (`turns`).
    kl: (its weight, column of the policy's log-probs), if the KL is subtracted from every token's reward.
    device: where collectives run.
    A failed sample is in no mean and variance, the critic learns nothing from it (its returns are its values), and its
    advantages are at most 0, and no lower than the lowest of the other samples.
    """
    estimator = get_adv_estimator(config.adv_estimator)
    mask = shard[RESPONSE_MASK]
    turns = Turns.of(shard.samples) if TURN_REWARDS.name in shard.samples else None
    rewards_S = torch.as_tensor(shard[REWARDS if turns is None else REWARD_AFTER].astype(np.float32))
    failed_T = torch.tensor(shard[REWARD_FAILED], dtype=torch.bool).repeat_interleave(mask.lengths)
    counted_T = (mask.values != 0) & ~failed_T
    rewards_T = rewards_at_last_token(rewards_S, mask.values, mask.cu_seqlens)
    if turns is not None:
        rewards_T = rewards_T + turns.rewards_on_tokens(mask)
    if kl is not None:
        coef, old_logprobs = kl
        rewards_T = rewards_T - coef * reward_kl(shard, config.kl_penalty, old_logprobs=old_logprobs).values
    columns = {name: _column(shard, name) for name in estimator.needs}
    advantages_T, returns_T = estimator(rewards_T, mask.values, mask.cu_seqlens, config, **columns)
    if estimator.whiten:
        advantages_T = whiten_selected(
            advantages_T.to(device), mask.values.to(device), counted=counted_T.to(device), group=group
        ).cpu()
    lowest = torch.cat([advantages_T.new_zeros(1), advantages_T[counted_T]]).amin().to(device)
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
    advantages_T = torch.where(failed_T, advantages_T.clamp(lowest.cpu(), lowest.new_zeros(()).cpu()), advantages_T)
    values_T = columns.get(VALUES.name)
    if values_T is not None:
        returns_T = torch.where(failed_T & (mask.values != 0), values_T, returns_T)
    made = {TOKEN_ADVANTAGES.name: advantages_T, RETURNS.name: returns_T}
    stats, metrics = dict(made), {}
    if values_T is not None:
        metrics |= explained_variance_sums(values_T, returns_T, counted_T)
        stats[VALUES.name] = values_T
    for name, column_T in stats.items():
        metrics |= token_stat_sums(f"critic/{name}", column_T, mask.values)
    return metrics, DataProto({name: Jagged(column_T, mask.cu_seqlens) for name, column_T in made.items()})


def turn_advantages_on_tokens(shard: DataProto) -> tuple[dict[str, Metric], DataProto]:
    """The column turn_advantages as columns advantages and returns of tokens, and metrics to merge over the ranks."""
    mask, turns = shard[RESPONSE_MASK], Turns.of(shard.samples)
    advantages_K = np.array([value for row in shard[TURN_ADVANTAGES] for value in row], np.float32)
    advantages_T = turns.on_tokens(advantages_K, mask)
    metrics: dict[str, Metric] = {}
    for name in (TOKEN_ADVANTAGES.name, RETURNS.name):
        metrics |= token_stat_sums(f"critic/{name}", advantages_T, mask.values)
    column = Jagged(advantages_T, mask.cu_seqlens)
    return metrics, DataProto({TOKEN_ADVANTAGES.name: column, RETURNS.name: column})


def _column(shard: DataProto, name: str) -> Tensor:
    """[T] of a token column, or [S] of a sample column."""
    if name == TURN_INDEX:
        turns = Turns.of(shard.samples)
        return turns.on_tokens(turns.numbers(shard[TURNS_BEFORE]), shard[RESPONSE_MASK], elsewhere=-1)
    return shard.tokens[name].values if name in shard.tokens else torch.tensor(shard.samples[name])


def selected_tokens_column(
    shard: DataProto,
    micro_batches: Sequence[Sequence[Sequence[int]]],
    config: PolicyLossConfig,
    totals: list[dict[str, int]],
    *,
    mask: Column[Jagged],
    group: dist.ProcessGroup,
    device: str,
) -> Jagged:
    """Marks the tokens that clip_cov and kl_cov single out in mini-batches of all ranks (`covariance.select_tokens`).

    micro_batches[mini-batch][micro-batch]: positions in the shard's rows.  mask: the column of the loss tokens.
    """
    masks = shard[mask]
    names = [
        # The first trajectory of a sample has the name of the sample.
        (*of_sample, index) if index else tuple(of_sample)
        for *of_sample, index in zip(*(shard[name].tolist() for name in ROW_NAMES), strict=True)
    ]
    old_logprobs, advantages = shard[OLD_LOGPROBS].values, shard[TOKEN_ADVANTAGES].values
    keys_T = token_keys(names, masks.cu_seqlens)
    selected_T = torch.zeros(len(masks.values), dtype=torch.bool)
    for mini_batch, total in zip(micro_batches, totals, strict=True):
        chosen_S = torch.zeros(len(shard), dtype=torch.bool)
        chosen_S[[row for rows in mini_batch for row in rows]] = True
        chosen_T = chosen_S.repeat_interleave(masks.lengths)
        old_M, advantages_M, mask_M, keys_M = (
            column[chosen_T].to(device) for column in (old_logprobs, advantages, masks.values, keys_T)
        )
        selected_T[chosen_T] = select_tokens(
            old_M, advantages_M, mask_M, keys_M, config, total["num_loss_tokens"], group=group
        ).cpu()
    return Jagged(selected_T, masks.cu_seqlens)
