"""Actor and Reference (`scalerl.roles`) over one group of trainer ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalerl.config.schema import ActorConfig
from scalerl.controller.batch import ShardedBatch
from scalerl.controller.worker_group import WorkerGroup
from scalerl.metrics import Metric, merge_metrics

Metrics = dict[str, Metric]


@dataclass(frozen=True)
class MegatronActor:
    workers: WorkerGroup
    config: ActorConfig
    # The sampler's: log-probs are of softmax(logits / temperature).
    temperature: float

    def logprobs(self, batch: ShardedBatch) -> tuple[ShardedBatch, Metrics]:
        metrics, columns = self.workers.compute_log_prob(batch, temperature=self.temperature)
        return batch.with_columns(columns), metrics

    def update(self, batch: ShardedBatch) -> Metrics:
        metrics, _ = self.workers.update_actor(
            batch, config=self.config, temperature=self.temperature, totals=loss_totals(batch)
        )
        if self.config.use_kl_loss:
            metrics["actor/kl_coef"] = Metric(self.config.kl_loss_coef, "mean")
        return metrics

    def save(self, directory: str) -> None:
        self.workers.save_checkpoint(directory)

    def load(self, directory: str) -> None:
        self.workers.load_checkpoint(directory)

    def memory(self) -> Metrics:
        return merge_metrics(self.workers.memory())


@dataclass(frozen=True)
class MegatronReference:
    workers: WorkerGroup
    temperature: float

    def logprobs(self, batch: ShardedBatch) -> tuple[ShardedBatch, Metrics]:
        metrics, columns = self.workers.compute_ref_log_prob(batch, temperature=self.temperature)
        return batch.with_columns(columns), metrics


def loss_totals(batch: ShardedBatch) -> list[dict[str, int]]:
    """Per mini-batch, over all ranks: tokens and sequences that count in the loss (every sampled token does)."""
    lengths_S = batch.samples["response_length"]
    totals = []
    for mini_batch in range(batch.plan.num_mini_batches):
        rows = [row for rank in batch.plan.micro_batches for micro_batch in rank[mini_batch] for row in micro_batch]
        totals.append(
            {"num_loss_tokens": int(lengths_S[rows].sum()), "num_sequences": int(np.count_nonzero(lengths_S[rows]))}
        )
    return totals
