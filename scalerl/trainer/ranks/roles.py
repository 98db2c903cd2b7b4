"""Actor, Reference, Critic and RewardModel (`trainer.contracts`) over groups of ranks: the same group, or one each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from scalerl.algorithms import get_adv_estimator, policy_loss_needs
from scalerl.algorithms.losses import SELECTED
from scalerl.batch import StepPlan
from scalerl.cluster.batch import TOKENS, PlacedBatch
from scalerl.cluster.worker_group import WorkerGroup
from scalerl.config.schema import ActorConfig, AlgorithmConfig, CriticConfig, RolloutCorrectionConfig
from scalerl.tracking.metrics import Metric, Metrics, explained_variance_metrics
from scalerl.trainer.ranks.rl_worker import RLWorker
from scalerl.trainer.ranks.run_estimators import SAMPLE_NAMES
from scalerl.trainer.ranks.worker import MegatronWorker, Writing, begin_rank_saves


@dataclass(frozen=True)
class MegatronActor:
    """The policy that is trained, on a group of ranks."""

    workers: WorkerGroup
    config: ActorConfig
    # The sampler's temperature: log-probs are of softmax(logits / temperature).
    temperature: float
    correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    def logprobs(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        """The batch with old_logprobs, with a correction also num_loss_tokens [S]. With bypass_mode it stays as it is:
        the sampler's log-probs, which it has, are the old ones."""
        if self.correction.bypass_mode:
            return batch, {}
        metrics, counts, columns = self.workers.call(
            RLWorker.compute_log_prob,
            batch.shards("actor", TOKENS),
            temperature=self.temperature,
            correction=self.correction,
            config=self.config,
        )
        return batch.with_column("old_logprobs", "actor", columns).with_samples(**counts), metrics

    def worst_tokens(self, batch: PlacedBatch) -> dict[str, np.ndarray]:
        """The token of each sample whose two log-probs differ most (`logprob_mismatch`); {} with bypass_mode."""
        if self.correction.bypass_mode:
            return {}
        shards = batch.shards("actor", TOKENS, "old_logprobs")
        return self.workers.call(RLWorker.find_worst_tokens, shards).samples

    @property
    def _old_logprobs(self) -> tuple[str, list[str]]:
        """The name of the token column with the policy's log-probs, and the columns of the batch that hold it."""
        return ("rollout_logprobs", []) if self.correction.bypass_mode else ("old_logprobs", ["old_logprobs"])

    def reward_kl(self, batch: PlacedBatch, kind: str) -> np.ndarray:
        """[S] float64: KL to the reference, summed over the sampled tokens of each sample."""
        name, held = self._old_logprobs
        shards = batch.shards("actor", TOKENS, *held, "ref_logprobs")
        sums = self.workers.call(RLWorker.sum_reward_kl, shards, kind=kind, old_logprobs=name).samples
        return sums["reward_kl"]

    def token_advantages(
        self, batch: PlacedBatch, config: AlgorithmConfig, *, kl_coef: float | None
    ) -> tuple[PlacedBatch, Metrics]:
        """Adds advantages and returns of single tokens to the batch. kl_coef: weight of the KL in the rewards."""
        name, held = self._old_logprobs
        columns = ["rewards", "reward_failed", *get_adv_estimator(config.adv_estimator).needs]
        columns += ["values"] if "values" in batch.columns else []
        columns += [*held, "ref_logprobs"] if kl_coef is not None else []
        metrics, _, columns_made = self.workers.call(
            RLWorker.compute_advantages,
            batch.shards("actor", TOKENS, *dict.fromkeys(columns)),
            config=config,
            kl=None if kl_coef is None else (kl_coef, name),
        )
        if "values" in columns:
            metrics = explained_variance_metrics(metrics)
        return batch.with_column("advantages", "actor", columns_made), metrics

    def _made_before(self, batch: PlacedBatch) -> list[str]:
        """Columns of the batch that an update reads beside its tokens and the old log-probs."""
        used = ["advantages", *(["ref_logprobs"] if self.config.use_kl_loss else [])]
        used += SAMPLE_NAMES if SELECTED in policy_loss_needs(self.config.policy_loss.loss_mode) else []
        return [name for name in used if name in batch.columns or name in batch.samples]

    def evaluate_and_update(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        shards = batch.shards("actor", TOKENS, *self._made_before(batch))
        metrics, _, columns = self.workers.call(
            RLWorker.evaluate_and_update_actor,
            shards,
            config=self.config,
            temperature=self.temperature,
            totals=loss_totals(shards.plan, batch.samples["num_sampled_tokens"]),
        )
        return batch.with_column("old_logprobs", "actor", columns), metrics | self._kl_coef()

    def _kl_coef(self) -> Metrics:
        return {"actor/kl_coef": Metric(self.config.kl_loss_coef, "mean")} if self.config.use_kl_loss else {}

    def update(self, batch: PlacedBatch) -> Metrics:
        old_logprobs = [] if self.correction.bypass_mode else ["old_logprobs"]
        shards = batch.shards("actor", TOKENS, *old_logprobs, *self._made_before(batch))
        counts = "num_loss_tokens" if "num_loss_tokens" in batch.samples else "num_sampled_tokens"
        metrics = self.workers.call(
            RLWorker.update_actor,
            shards,
            config=self.config,
            temperature=self.temperature,
            totals=loss_totals(shards.plan, batch.samples[counts]),
            bypass_mode=self.correction.bypass_mode,
        ).metrics
        return metrics | self._kl_coef()

    def save(self, directory: str) -> None:
        self.workers.call(MegatronWorker.save_checkpoint, "actor", directory)

    def begin_save(self, directory: str) -> Writing:
        return begin_rank_saves(self.workers, "actor", directory)

    def load(self, directory: str) -> None:
        self.workers.call(MegatronWorker.load_checkpoint, "actor", directory)


@dataclass(frozen=True)
class MegatronReference:
    """The frozen reference model, on a group of ranks."""

    workers: WorkerGroup
    temperature: float

    def logprobs(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        shards = batch.shards("ref", TOKENS)
        metrics, _, columns = self.workers.call(RLWorker.compute_ref_log_prob, shards, temperature=self.temperature)
        return batch.with_column("ref_logprobs", "ref", columns), metrics


@dataclass(frozen=True)
class MegatronCritic:
    """The critic, on a group of ranks."""

    workers: WorkerGroup
    config: CriticConfig

    def values(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        metrics, _, columns = self.workers.call(RLWorker.compute_values, batch.shards("critic", TOKENS))
        return batch.with_column("values", "critic", columns), metrics

    def update(self, batch: PlacedBatch) -> Metrics:
        shards = batch.shards("critic", TOKENS, "values", "advantages")
        # What the policy does not learn from was sampled and scored all the same: the critic learns from all of it.
        totals = loss_totals(shards.plan, batch.samples["num_sampled_tokens"])
        return self.workers.call(RLWorker.update_critic, shards, config=self.config, totals=totals).metrics

    def save(self, directory: str) -> None:
        self.workers.call(MegatronWorker.save_checkpoint, "critic", directory)

    def begin_save(self, directory: str) -> Writing:
        return begin_rank_saves(self.workers, "critic", directory)

    def load(self, directory: str) -> None:
        self.workers.call(MegatronWorker.load_checkpoint, "critic", directory)


@dataclass(frozen=True)
class MegatronRewardModel:
    """The reward model, on a group of ranks."""

    workers: WorkerGroup

    def scores(self, batch: PlacedBatch) -> np.ndarray:
        """The scores [S] float64 of all samples."""
        computed = self.workers.call(RLWorker.compute_scores, batch.shards("reward_model", TOKENS))
        return computed.samples["scores"].astype(np.float64)


def loss_totals(plan: StepPlan, num_loss_tokens_S: np.ndarray) -> list[dict[str, int]]:
    """The loss tokens of each mini-batch over all ranks, and its sequences with at least one of these."""
    totals = []
    for mini_batch in range(plan.num_mini_batches):
        micro_batches = itertools.chain.from_iterable(rank[mini_batch] for rank in plan.micro_batches)
        counts = num_loss_tokens_S[np.fromiter(itertools.chain.from_iterable(micro_batches), np.int64)]
        totals.append({"num_loss_tokens": int(counts.sum()), "num_sequences": int(np.count_nonzero(counts))})
    return totals
