"""Computes the rewards and advantages of a step's batch from its scores. S: number of samples."""

from __future__ import annotations

import numpy as np
import torch

from scalerl.algorithms import KLController, get_adv_estimator
from scalerl.cluster.batch import BatchRef, PlacedBatch
from scalerl.config.schema import AlgorithmConfig
from scalerl.metrics import Metric
from scalerl.trainer.contracts import Actor, Rollout

# The sample column that remax needs, and that estimators of the user may need.
GREEDY_SCORE = "baseline_score"


def needs_greedy_baseline(config: AlgorithmConfig) -> bool:
    """Whether the advantage estimator needs the score of a greedy response to each prompt."""
    return GREEDY_SCORE in get_adv_estimator(config.adv_estimator).needs


def add_greedy_baseline(rollout: Rollout, samples: BatchRef) -> tuple[BatchRef, dict[str, Metric]]:
    """Adds the sample column baseline_score: the score of a greedy response to the prompt, by the served weights."""
    scores_S, metrics = rollout.greedy_scores(samples)
    metrics = metrics | {"critic/baseline_score/mean": Metric(float(scores_S.mean()), "mean")}
    return samples.with_samples(**{GREEDY_SCORE: scores_S}), metrics


def estimate_advantages(
    actor: Actor, batch: PlacedBatch, config: AlgorithmConfig, kl: KLController | None
) -> tuple[PlacedBatch, dict[str, Metric]]:
    """Adds the advantages to the batch: one per sample, or one per token, which the actor's ranks compute and keep.

    kl: the controller of the KL penalty with use_kl_in_reward, else None. The penalty is subtracted from the rewards,
        and the controller sets the penalty's weight for the next step.
    Raises ValueError when the batch lacks a column that the estimator needs.
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
        batch, advantage_metrics = actor.token_advantages(batch, config, kl_coef=kl_coef)
        return batch, metrics | advantage_metrics
    # torch.tensor copies: columns that Ray delivered are not writable.
    rewards_S = torch.tensor(batch.samples.get("rewards", batch.samples["score"]), dtype=torch.float64)
    columns = {name: batch.samples[name] for name in estimator.needs}
    advantages_S = estimator(rewards_S, batch.samples["uid"], config, **columns)
    return batch.with_samples(advantages=advantages_S.numpy()), metrics


def penalize_kl(actor: Actor, batch: PlacedBatch, kind: str, kl: KLController) -> tuple[PlacedBatch, dict[str, Metric]]:
    """Adds the sample column rewards = score - coef * (KL summed over the tokens), then updates the controller."""
    sums_S, lengths_S = actor.reward_kl(batch, kind), batch.samples["num_sampled_tokens"]
    has_tokens_S = lengths_S > 0
    mean = float(np.mean(sums_S[has_tokens_S] / lengths_S[has_tokens_S])) if has_tokens_S.any() else 0.0
    coef = kl.coef
    kl.update(mean, len(lengths_S))
    return batch.with_samples(rewards=batch.samples["score"] - coef * sums_S), {
        "actor/reward_kl_penalty": Metric(mean, "mean"),
        "actor/reward_kl_penalty_coeff": Metric(coef, "mean"),
    }
