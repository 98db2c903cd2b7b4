"""Actor, Reference, Critic and RewardModel (`scalerl.roles`) over groups of ranks: the same group, or one each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from scalerl.balance import StepPlan
from scalerl.config.correction_rules import rejects
from scalerl.config.schema import ActorConfig, AlgorithmConfig, CriticConfig, RolloutCorrectionConfig
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
    correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    def logprobs(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        """With a rejection the batch has num_loss_tokens [S] too. With bypass_mode it stays as it is: the sampler's
        log-probs, which it has, are the old ones."""
        if self.correction.bypass_mode:
            return batch, {}
        metrics, column = self.workers.compute_log_prob(
            batch.shards("actor", TOKENS), temperature=self.temperature, correction=self.correction
        )
        batch = batch.with_column("old_logprobs", "actor", column)
        if rejects(self.correction):
            shards = batch.shards("actor", "old_logprobs")
            batch = batch.with_samples(**sample_columns(shards.plan, self.workers.count_loss_tokens(shards)[1]))
        return batch, metrics

    def worst_tokens(self, batch: PlacedBatch) -> dict[str, np.ndarray]:
        """Per sample, the token whose two log-probs differ most (`two_log_probs.worst_tokens`); {} with bypass_mode."""
        if self.correction.bypass_mode:
            return {}
        shards = batch.shards("actor", TOKENS, "old_logprobs")
        return sample_columns(shards.plan, self.workers.find_worst_tokens(shards)[1])

    @property
    def _old_logprobs(self) -> tuple[str, list[str]]:
        """(name of the token column that says what the policy gave, columns of the batch that hold it)."""
        return ("rollout_logprobs", []) if self.correction.bypass_mode else ("old_logprobs", ["old_logprobs"])

    def reward_kl(self, batch: PlacedBatch, kind: str) -> np.ndarray:
        """[S] float64: KL to the reference, summed over the sampled tokens of each sample."""
        name, held = self._old_logprobs
        shards = batch.shards("actor", TOKENS, *held, "ref_logprobs")
        found = self.workers.sum_reward_kl(shards, kind=kind, old_logprobs=name)[1]
        return sample_columns(shards.plan, found)["reward_kl"]

    def token_advantages(
        self, batch: PlacedBatch, config: AlgorithmConfig, *, kl_coef: float | None
    ) -> tuple[PlacedBatch, Metrics]:
        """The batch with advantages and returns of single tokens. kl_coef: weight of the KL in the rewards, if any."""
        name, held = self._old_logprobs
        columns = ["values"] if "values" in batch.columns else []
        columns += [*held, "ref_logprobs"] if kl_coef is not None else []
        metrics, column = self.workers.compute_advantages(
            batch.shards("actor", TOKENS, *columns), config=config, kl=None if kl_coef is None else (kl_coef, name)
        )
        if "values" in columns:
            metrics = explained_variance_metrics(metrics)
        return batch.with_column("advantages", "actor", column), metrics

    def update(self, batch: PlacedBatch) -> Metrics:
        made = [] if self.correction.bypass_mode else ["old_logprobs"]
        used = ["advantages", *(["ref_logprobs"] if self.config.use_kl_loss else [])]
        optional = [name for name in used if name in batch.columns]
        shards = batch.shards("actor", TOKENS, *made, *optional)
        counts = "num_loss_tokens" if rejects(self.correction) else "response_length"
        metrics, _ = self.workers.update_actor(
            shards,
            config=self.config,
            temperature=self.temperature,
            totals=loss_totals(shards.plan, batch.samples[counts]),
            bypass_mode=self.correction.bypass_mode,
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
        # What the policy does not learn from was sampled and scored all the same: the critic learns from all of it.
        metrics, _ = self.workers.update_critic(
            shards, config=self.config, totals=loss_totals(shards.plan, batch.samples["response_length"])
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
        return sample_columns(shards.plan, self.workers.compute_scores(shards)[1])["scores"].astype(np.float64)


def sample_columns(plan: StepPlan, fragments: list[Any]) -> dict[str, np.ndarray]:
    """Column -> [S] in the batch's order.

    fragments[dp_rank]: reference to a DataProto of sample columns alone, with the rows of plan.rows(dp_rank).
    """
    parts = ray.get(fragments)
    order = np.argsort([row for dp_rank in range(plan.dp_size) for row in plan.rows(dp_rank)])
    return {name: np.concatenate([part.samples[name] for part in parts])[order] for name in parts[0].samples}


def loss_totals(plan: StepPlan, num_loss_tokens_S: np.ndarray) -> list[dict[str, int]]:
    """Per mini-batch, over all ranks: tokens that count in the loss, and sequences with at least one."""
    totals = []
    for mini_batch in range(plan.num_mini_batches):
        rows = [row for rank in plan.micro_batches for micro_batch in rank[mini_batch] for row in micro_batch]
        counts = num_loss_tokens_S[rows]
        totals.append({"num_loss_tokens": int(counts.sum()), "num_sequences": int(np.count_nonzero(counts))})
    return totals
