"""Actor, Reference, Critic and RewardModel (`scalerl.roles`) over groups of ranks: the same group, or one each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import ray

from scalerl.balance import StepPlan
from scalerl.config.schema import ActorConfig, AlgorithmConfig, CriticConfig
from scalerl.controller.batch import PlacedBatch
from scalerl.controller.worker_group import WorkerGroup
from scalerl.metrics import Metric, explained_variance_metrics

Metrics = dict[str, Metric]
# What the rollout makes, as one column of a PlacedBatch: input_ids, response_mask, rollout_logprobs.
TOKENS = "tokens"


@dataclass(frozen=True)
class MegatronActor:
    workers: WorkerGroup
    config: ActorConfig
    # The sampler's: log-probs are of softmax(logits / temperature).
    temperature: float

    def logprobs(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        metrics, column = self.workers.compute_log_prob(batch.shards("actor", TOKENS), temperature=self.temperature)
        return batch.with_column("old_logprobs", "actor", column), metrics

    def gae(self, batch: PlacedBatch, config: AlgorithmConfig) -> tuple[PlacedBatch, Metrics]:
        """The batch with advantages and returns, from the critic's values."""
        metrics, column = self.workers.compute_gae(batch.shards("actor", TOKENS, "values"), config=config)
        return batch.with_column("advantages", "actor", column), explained_variance_metrics(metrics)

    def update(self, batch: PlacedBatch) -> Metrics:
        columns = [TOKENS, "old_logprobs", *(name for name in ("ref_logprobs", "advantages") if name in batch.columns)]
        shards = batch.shards("actor", *columns)
        metrics, _ = self.workers.update_actor(
            shards, config=self.config, temperature=self.temperature, totals=loss_totals(shards.plan, batch.samples)
        )
        if self.config.use_kl_loss:
            metrics["actor/kl_coef"] = Metric(self.config.kl_loss_coef, "mean")
        return metrics

    def save(self, directory: str) -> None:
        self.workers.save_checkpoint("actor", directory)

    def load(self, directory: str) -> None:
        self.workers.load_checkpoint("actor", directory)


@dataclass(frozen=True)
class MegatronReference:
    workers: WorkerGroup
    temperature: float

    def logprobs(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        metrics, column = self.workers.compute_ref_log_prob(batch.shards("ref", TOKENS), temperature=self.temperature)
        return batch.with_column("ref_logprobs", "ref", column), metrics


@dataclass(frozen=True)
class MegatronCritic:
    workers: WorkerGroup
    config: CriticConfig

    def values(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        metrics, column = self.workers.compute_values(batch.shards("critic", TOKENS))
        return batch.with_column("values", "critic", column), metrics

    def update(self, batch: PlacedBatch) -> Metrics:
        shards = batch.shards("critic", TOKENS, "values", "advantages")
        metrics, _ = self.workers.update_critic(
            shards, config=self.config, totals=loss_totals(shards.plan, batch.samples)
        )
        return metrics

    def save(self, directory: str) -> None:
        self.workers.save_checkpoint("critic", directory)

    def load(self, directory: str) -> None:
        self.workers.load_checkpoint("critic", directory)


@dataclass(frozen=True)
class MegatronRewardModel:
    workers: WorkerGroup

    def scores(self, batch: PlacedBatch) -> np.ndarray:
        """[S] float64, of every sample."""
        shards = batch.shards("reward_model", TOKENS)
        _, columns = self.workers.compute_scores(shards)
        scores_S = np.empty(sum(len(shards.plan.rows(rank)) for rank in range(shards.plan.dp_size)))
        for rank, part in enumerate(ray.get(columns)):
            scores_S[list(shards.plan.rows(rank))] = part.samples["scores"]
        return scores_S


def loss_totals(plan: StepPlan, samples: dict[str, np.ndarray]) -> list[dict[str, int]]:
    """Per mini-batch, over all ranks: tokens and sequences that count in the loss (every sampled token does)."""
    lengths_S = samples["response_length"]
    totals = []
    for mini_batch in range(plan.num_mini_batches):
        rows = [row for rank in plan.micro_batches for micro_batch in rank[mini_batch] for row in micro_batch]
        totals.append(
            {"num_loss_tokens": int(lengths_S[rows].sum()), "num_sequences": int(np.count_nonzero(lengths_S[rows]))}
        )
    return totals
