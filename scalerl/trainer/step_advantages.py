"""Computes the rewards and advantages of a step's batch from its scores. S: number of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from scalerl.algorithms import AdvantageEstimator, KLController, get_adv_estimator
from scalerl.algorithms.advantages import TURN_INDEX
from scalerl.base.user_code import UserCodeError, place_of
from scalerl.batch import episodes
from scalerl.batch.columns import BASELINE_SCORE, NUM_SAMPLED_TOKENS, TURN_ADVANTAGES, TURN_LENGTHS
from scalerl.batch.turns import Turns
from scalerl.cluster.batch import HeldRows, PlacedBatch
from scalerl.config.schema import AlgorithmConfig
from scalerl.tracking.metrics import Metric
from scalerl.tracking.metrics.failed_samples import as_wrong

if TYPE_CHECKING:
    # The checks before a run import this module, and a dry run nothing that only a run needs.
    from scalerl.rollout.sampling.rollout import HybridRollout
    from scalerl.trainer.ranks.roles import MegatronActor


def needs_greedy_baseline(config: AlgorithmConfig) -> bool:
    """Whether the advantage estimator needs the score of a greedy response to each prompt."""
    return BASELINE_SCORE.name in get_adv_estimator(config.adv_estimator).needs


def add_greedy_baseline(rollout: HybridRollout, samples: HeldRows) -> tuple[HeldRows, dict[str, Metric]]:
    """Adds the sample column baseline_score: the reward of a greedy response to the prompt, by the served weights.

    Where the greedy response failed, a sample's own reward is its baseline, so that it has no advantage.
    """
    scores_S, metrics = rollout.greedy_scores(samples)
    failed_S = np.isnan(scores_S)
    if not failed_S.all():
        metrics = metrics | {"critic/baseline_score/mean": Metric(float(scores_S[~failed_S].mean()), "mean")}
    scores_S = np.where(failed_S, rewards_of(samples.samples), scores_S)
    return samples.with_samples(**{BASELINE_SCORE.name: scores_S}), metrics


def estimate_advantages(
    actor: MegatronActor, batch: PlacedBatch, config: AlgorithmConfig, kl: KLController | None
) -> tuple[PlacedBatch, dict[str, Metric]]:
    """Adds rewards and advantages to the batch: one per sample, or of single tokens, which the actor's ranks keep.

    kl: the controller of the KL penalty with use_kl_in_reward, else None. The penalty is subtracted from the rewards,
        and the controller sets the penalty's weight for the next step.
    Raises ValueError when the batch lacks a column that the estimator needs.
    """
    estimator = get_adv_estimator(config.adv_estimator)
    check_turn_level(estimator, config)
    known = {*batch.samples, *batch.columns}
    if estimator.per_token and batch.has(TURN_LENGTHS):
        known.add(TURN_INDEX)
    if missing := [name for name in estimator.needs if name not in known]:
        raise ValueError(
            f"algorithm.adv_estimator={config.adv_estimator} needs {', '.join(missing)}, which this run does not make: "
            f"the batch has {sorted([*batch.samples, *batch.columns])}"
        )
    batch = batch.with_samples(rewards=rewards_of(batch.samples))
    metrics: dict[str, Metric] = {}
    if estimator.per_token:
        # The ranks take the KL off every token's reward.
        batch, metrics = actor.token_advantages(batch, config, kl_coef=None if kl is None else kl.coef)
    if kl is not None:
        batch, kl_metrics = penalize_kl(actor, batch, config.kl_penalty, kl)
        metrics = metrics | kl_metrics
    if config.turn_level:
        advantages_K = turn_advantages(estimator, batch.samples, config)
        made = {TURN_ADVANTAGES.name: Turns.of(batch.samples).of_rows(advantages_K)}
        spread, pass_metrics = actor.spread_turn_advantages(batch.with_samples(**made))
        return replace(spread, samples=batch.samples), metrics | pass_metrics
    if not estimator.per_token:
        batch = batch.with_samples(advantages=sample_advantages(estimator, batch.samples, config))
    return batch, metrics


def check_turn_level(estimator: AdvantageEstimator, config: AlgorithmConfig) -> None:
    """Raises UserCodeError for algorithm.turn_level with an estimator of tokens."""
    if config.turn_level and estimator.per_token:
        raise UserCodeError(
            f"algorithm.turn_level = true: {place_of(estimator.function)} gives each token an advantage; register it "
            "with register_adv_est, or set algorithm.turn_level=false"
        )


def rewards_of(samples: Mapping[str, np.ndarray]) -> np.ndarray:
    """The rewards [S] that the policy learns from: score and penalty; of failed samples what counts as wrong."""
    return as_wrong(samples["score"] + samples["reward_penalty"], samples["data_source"], samples["reward_failed"])


def sample_advantages(
    estimator: AdvantageEstimator, samples: Mapping[str, np.ndarray], config: AlgorithmConfig
) -> np.ndarray:
    """The advantages [S] of an estimator of samples, which sees no failed sample.

    The rows of an episode have one advantage (`episodes`). A failed sample has the lowest advantage of its group, at
    most 0. A sample whose siblings have all failed has 0: there is nothing to compare it with.
    """
    episode_S, groups_S = episodes.of_rows(samples), episodes.groups(samples)
    columns = episodes.columns({**samples, "group": groups_S})
    return _compared(estimator, columns, _is_alone(columns["group"]), config)[episode_S]


def turn_advantages(
    estimator: AdvantageEstimator, samples: Mapping[str, np.ndarray], config: AlgorithmConfig
) -> np.ndarray:
    """The advantages [K] of the turns of all rows, by an estimator of samples that gets a turn as a sample.

    Its reward is what the episode earns from it on, discounted by algorithm.gamma for each turn (`Turns.returns`); its
    group are the turns of the same number of the group's other samples. A turn that no other sample has is compared
    with nothing, and has 0.
    Source: GTPO (arXiv 2511.14846), whose advantages are normalized discounted returns of turns; without its shaping of
    rewards. Returns and not rewards are compared: a sum of rewards that are each less a mean over the group, as in the
    process supervision of DeepSeekMath (arXiv 2402.03300, section 4.1.3), has a baseline that depends on the number of
    turns to come, and so on what the turn does.
    """
    turns, groups_S = Turns.of(samples), episodes.groups(samples)
    numbers_K = turns.numbers(turns.before_rows(samples))
    of_both = np.stack([groups_S[turns.rows_K], numbers_K], axis=1)
    columns = {name: samples[name][turns.rows_K] for name in ("reward_failed", *estimator.needs)}
    columns["group"] = np.unique(of_both, axis=0, return_inverse=True)[1].reshape(-1)
    columns["rewards"] = turns.returns(samples, config.gamma)
    if NUM_SAMPLED_TOKENS.name in estimator.needs:
        columns[NUM_SAMPLED_TOKENS.name] = turns.lengths_K
    is_alone_E = _is_alone(groups_S[episodes.starts(samples)])
    return _compared(estimator, columns, is_alone_E[episodes.of_rows(samples)][turns.rows_K], config)


def _is_alone(groups_S: np.ndarray) -> np.ndarray:
    """[S] whether a sample is its whole group."""
    _, group_S, counts_G = np.unique(groups_S, return_inverse=True, return_counts=True)
    return (counts_G == 1)[group_S]


def _compared(
    estimator: AdvantageEstimator, columns: Mapping[str, np.ndarray], is_alone_S: np.ndarray, config: AlgorithmConfig
) -> np.ndarray:
    """The advantages [S] float32 of samples, or of turns.  is_alone_S: to be estimated with nothing to compare with."""
    failed_S, groups_S = columns["reward_failed"], columns["group"]
    _, group_S, counts_G = np.unique(groups_S, return_inverse=True, return_counts=True)
    num_scored_G = np.bincount(group_S[~failed_S], minlength=len(counts_G))
    is_compared_S = ~failed_S & ((num_scored_G > 1)[group_S] | is_alone_S)
    advantages_S, worst_G = np.zeros(len(failed_S), np.float32), np.zeros(len(counts_G), np.float32)
    if is_compared_S.any():
        # torch.tensor copies: columns that Ray delivered are not writable.
        rewards_S = torch.tensor(columns["rewards"][is_compared_S], dtype=torch.float64)
        needed = {name: columns[name][is_compared_S] for name in estimator.needs}
        advantages_S[is_compared_S] = estimator(rewards_S, groups_S[is_compared_S], config, **needed).numpy()
    np.minimum.at(worst_G, group_S[is_compared_S], advantages_S[is_compared_S])
    advantages_S[failed_S] = worst_G[group_S[failed_S]]
    return advantages_S


def penalize_kl(
    actor: MegatronActor, batch: PlacedBatch, kind: str, kl: KLController
) -> tuple[PlacedBatch, dict[str, Metric]]:
    """Takes coef * (KL summed over the tokens of the episode) off the sample column rewards, then updates the
    controller."""
    sums_E = episodes.sums(batch.samples, actor.reward_kl(batch, kind))
    lengths_E = episodes.sums(batch.samples, batch.samples["num_sampled_tokens"])
    has_tokens_E = lengths_E > 0
    mean = float(np.mean(sums_E[has_tokens_E] / lengths_E[has_tokens_E])) if has_tokens_E.any() else 0.0
    coef = kl.coef
    kl.update(mean, len(lengths_E))
    penalty_S = coef * sums_E[episodes.of_rows(batch.samples)]
    return batch.with_samples(rewards=batch.samples["rewards"] - penalty_S), {
        "actor/reward_kl_penalty": Metric(mean, "mean"),
        "actor/reward_kl_penalty_coeff": Metric(coef, "mean"),
    }
