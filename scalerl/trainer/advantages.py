"""Scores -> rewards -> advantages of a step's batch. S samples."""

from __future__ import annotations

import numpy as np
import torch

from scalerl.algorithms import KLController, get_adv_estimator
from scalerl.cluster.batch import BatchRef, PlacedBatch
from scalerl.config.schema import AlgorithmConfig
from scalerl.metrics import Metric
from scalerl.trainer.contracts import Actor, Rollout

# Sample column that remax, and estimators of the user's own, may ask for.
GREEDY_SCORE = "baseline_score"


def needs_greedy_baseline(config: AlgorithmConfig) -> bool:
    return GREEDY_SCORE in get_adv_estimator(config.adv_estimator).needs


def add_greedy_baseline(rollout: Rollout, samples: BatchRef) -> tuple[BatchRef, dict[str, Metric]]:
    """The samples with the column baseline_score: of one greedy response to each prompt, by the weights served now."""
    scores_S, metrics = rollout.greedy_scores(samples)
    metrics = metrics | {"critic/baseline_score/mean": Metric(float(scores_S.mean()), "mean")}
    return samples.with_samples(**{GREEDY_SCORE: scores_S}), metrics


def estimate_advantages(
    actor: Actor, batch: PlacedBatch, config: AlgorithmConfig, kl: KLController | None
) -> tuple[PlacedBatch, dict[str, Metric]]:
    """The batch with its advantages: a sample column, or a token column from the actor's ranks, as the estimator is.

    kl: with use_kl_in_reward; the KL is then taken off the rewards, and the weight of the next step follows from it.
    Raises ValueError for a column that the estimator needs and the batch has not.
    """
    estimator = get_adv_estimator(config.adv_estimator)
    missing = [name for name in estimator.needs if name not in batch.samples and name not in batch.columns]
    if missing:
        raise ValueError(
            f"algorithm.adv_estimator={config.adv_estimator} needs {', '.join(missing)}, which this run does not make: "
            f"the batch has {sorted([*batch.samples, *batch.columns])}"
        )
    metrics: dict[str, Metric] = {}
    kl_coef = None if kl is None else kl.coef
    if kl is not None:
        batch, metrics = penalize_kl(actor, batch, config.kl_penalty, kl)
    if estimator.per_token:
        batch, found = actor.token_advantages(batch, config, kl_coef=kl_coef)
        return batch, metrics | found
    # A copy: columns that Ray brought are not writable.
    rewards_S = torch.tensor(batch.samples.get("rewards", batch.samples["score"]), dtype=torch.float64)
    columns = {name: batch.samples[name] for name in estimator.needs}
    advantages_S = estimator(rewards_S, batch.samples["uid"], config, **columns)
    return batch.with_samples(advantages=advantages_S.numpy()), metrics


def penalize_kl(actor: Actor, batch: PlacedBatch, kind: str, kl: KLController) -> tuple[PlacedBatch, dict[str, Metric]]:
    """The batch with the sample column rewards: score - coef * KL summed over the tokens. Moves the weight."""
    sums_S, lengths_S = actor.reward_kl(batch, kind), batch.samples["num_sampled_tokens"]
    has_tokens_S = lengths_S > 0
    mean = float(np.mean(sums_S[has_tokens_S] / lengths_S[has_tokens_S])) if has_tokens_S.any() else 0.0
    coef = kl.coef
    kl.update(mean, len(lengths_S))
    return batch.with_samples(rewards=batch.samples["score"] - coef * sums_S), {
        "actor/reward_kl_penalty": Metric(mean, "mean"),
        "actor/reward_kl_penalty_coeff": Metric(coef, "mean"),
    }
