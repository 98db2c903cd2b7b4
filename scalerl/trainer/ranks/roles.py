"""Actor, Reference, Critic and RewardModel (`trainer.contracts`) over groups of ranks: the same group, or one each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from scalerl.algorithms import get_adv_estimator
from scalerl.algorithms.losses import policy_loss_columns
from scalerl.batch import StepPlan
from scalerl.batch.columns import (
    INPUT_IDS,
    LOSS_MASK,
    NUM_LOSS_TOKENS,
    NUM_SAMPLED_TOKENS,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    RESPONSE_MASK,
    RETURNS,
    REWARD_FAILED,
    REWARD_KL,
    REWARD_STYLE,
    REWARDS,
    ROLLOUT_IS_WEIGHTS,
    ROLLOUT_LOGPROBS,
    SCORE,
    SCORES,
    SELECTED,
    TOKEN_ADVANTAGES,
    VALUES,
    Column,
)
from scalerl.batch.jagged import Jagged
from scalerl.cluster.batch import TOKENS, PlacedBatch
from scalerl.cluster.dispatch import Collected, Future
from scalerl.cluster.worker_group import WorkerGroup
from scalerl.config.schema import ActorConfig, AlgorithmConfig, CriticConfig, RolloutCorrectionConfig
from scalerl.tracking.metrics import Metric, Metrics, explained_variance_metrics
from scalerl.trainer.contracts import Pass
from scalerl.trainer.ranks.rl_worker import RLWorker
from scalerl.trainer.ranks.run_estimators import SAMPLE_NAMES
from scalerl.trainer.ranks.worker import MegatronWorker, Writing, begin_rank_saves

# Columns that a loss may need without naming what brings them: `TOKENS`, the old log-probs with the columns of the
# correction, the advantages with the returns; `update_actor` makes the last one.
MADE_ON_RANKS = {
    *(column.name for column in (INPUT_IDS, RESPONSE_MASK, ROLLOUT_LOGPROBS)),
    *(column.name for column in (OLD_LOGPROBS, ROLLOUT_IS_WEIGHTS, LOSS_MASK, TOKEN_ADVANTAGES, RETURNS)),
    SELECTED.name,
}


@dataclass(frozen=True)
class MegatronActor:
    """The policy that is trained, on a group of ranks."""

    workers: WorkerGroup
    config: ActorConfig
    # The sampler's temperature: log-probs are of softmax(logits / temperature).
    temperature: float
    correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    def logprobs(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        return self.begin_logprobs(batch).add_to(batch)

    def begin_logprobs(self, batch: PlacedBatch) -> Pass:
        """The pass adds old_logprobs, with a correction also num_loss_tokens [S]. With bypass_mode it adds nothing: the
        sampler's log-probs, which the batch has, are the old ones."""
        if self.correction.bypass_mode:
            return Pass(Future(lambda: Collected({}, {}, [])), lambda batch, made: batch)
        made = self.workers.call(
            RLWorker.compute_log_prob,
            batch.shards("actor", TOKENS),
            temperature=self.temperature,
            correction=self.correction,
            config=self.config,
        )
        return Pass(made, _with_old_logprobs)

    def worst_tokens(self, batch: PlacedBatch) -> dict[str, np.ndarray]:
        """The token of each sample whose two log-probs differ most (`logprob_mismatch`); {} with bypass_mode."""
        if self.correction.bypass_mode:
            return {}
        shards = batch.shards("actor", TOKENS, OLD_LOGPROBS)
        return self.workers.call(RLWorker.find_worst_tokens, shards).samples

    @property
    def _old_logprobs(self) -> Column[Jagged]:
        """The token column with the policy's log-probs."""
        return ROLLOUT_LOGPROBS if self.correction.bypass_mode else OLD_LOGPROBS

    @property
    def _held_old_logprobs(self) -> list[Column[Jagged]]:
        """The old log-probs as a column of the batch: none with bypass_mode, where they are among `TOKENS`."""
        return [] if self.correction.bypass_mode else [OLD_LOGPROBS]

    def reward_kl(self, batch: PlacedBatch, kind: str) -> np.ndarray:
        """[S] float64: KL to the reference, summed over the sampled tokens of each sample."""
        shards = batch.shards("actor", TOKENS, *self._held_old_logprobs, REF_LOGPROBS)
        sums = self.workers.call(RLWorker.sum_reward_kl, shards, kind=kind, old_logprobs=self._old_logprobs).samples
        return sums[REWARD_KL.name]

    def token_advantages(
        self, batch: PlacedBatch, config: AlgorithmConfig, *, kl_coef: float | None
    ) -> tuple[PlacedBatch, Metrics]:
        """Adds advantages and returns of single tokens to the batch. kl_coef: weight of the KL in the rewards."""
        columns = [REWARDS, REWARD_FAILED, *get_adv_estimator(config.adv_estimator).needs]
        columns += [VALUES] if batch.has(VALUES) else []
        columns += [*self._held_old_logprobs, REF_LOGPROBS] if kl_coef is not None else []
        metrics, _, columns_made = self.workers.call(
            RLWorker.compute_advantages,
            batch.shards("actor", TOKENS, *columns),
            config=config,
            kl=None if kl_coef is None else (kl_coef, self._old_logprobs),
        )
        if batch.has(VALUES):
            metrics = explained_variance_metrics(metrics)
        return batch.with_column(TOKEN_ADVANTAGES, "actor", columns_made), metrics

    def _loss_columns(self, batch: PlacedBatch) -> list[Column | str]:
        """Columns of the batch that an update reads, apart from its tokens and the old log-probs.

        Raises ValueError for a column that the policy loss needs and the run does not make.
        """
        loss_mode = self.config.policy_loss.loss_mode
        needs = policy_loss_columns(loss_mode)
        of_loss = [name for name in needs if name not in MADE_ON_RANKS]
        if missing := [name for name in of_loss if not batch.has(name)]:
            raise ValueError(
                f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode} needs {', '.join(missing)}, which this run "
                f"does not make: the batch has {sorted([*batch.samples, *batch.columns])}"
            )
        names: list[Column | str] = [TOKEN_ADVANTAGES, *of_loss]
        names += [REF_LOGPROBS] if self.config.use_kl_loss else []
        names += SAMPLE_NAMES if SELECTED.name in needs else []
        return names

    def evaluate_and_update(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        shards = batch.shards("actor", TOKENS, *self._loss_columns(batch))
        metrics, _, columns = self.workers.call(
            RLWorker.evaluate_and_update_actor,
            shards,
            config=self.config,
            temperature=self.temperature,
            totals=loss_totals(shards.plan, batch.samples[NUM_SAMPLED_TOKENS.name]),
        )
        return batch.with_column(OLD_LOGPROBS, "actor", columns), metrics | self._kl_coef()

    def _kl_coef(self) -> Metrics:
        return {"actor/kl_coef": Metric(self.config.kl_loss_coef, "mean")} if self.config.use_kl_loss else {}

    def update(self, batch: PlacedBatch) -> Metrics:
        shards = batch.shards("actor", TOKENS, *self._held_old_logprobs, *self._loss_columns(batch))
        counts = NUM_LOSS_TOKENS if batch.has(NUM_LOSS_TOKENS) else NUM_SAMPLED_TOKENS
        metrics = self.workers.call(
            RLWorker.update_actor,
            shards,
            config=self.config,
            temperature=self.temperature,
            totals=loss_totals(shards.plan, batch.samples[counts.name]),
            bypass_mode=self.correction.bypass_mode,
        ).metrics
        return metrics | self._kl_coef()

    def save(self, directory: str) -> None:
        self.workers.call(MegatronWorker.save_checkpoint, "actor", directory)

    def begin_save(self, directory: str) -> Writing:
        return begin_rank_saves(self.workers, "actor", directory)

    def load(self, directory: str) -> None:
        self.workers.call(MegatronWorker.load_checkpoint, "actor", directory)


def _with_old_logprobs(batch: PlacedBatch, made: Collected) -> PlacedBatch:
    return batch.with_column(OLD_LOGPROBS, "actor", made.columns).with_samples(**made.samples)


@dataclass(frozen=True)
class MegatronReference:
    """The frozen reference model, on a group of ranks."""

    workers: WorkerGroup
    temperature: float

    def logprobs(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        return self.begin_logprobs(batch).add_to(batch)

    def begin_logprobs(self, batch: PlacedBatch) -> Pass:
        shards = batch.shards("ref", TOKENS)
        made = self.workers.call(RLWorker.compute_ref_log_prob, shards, temperature=self.temperature)
        return Pass(made, lambda batch, made: batch.with_column(REF_LOGPROBS, "ref", made.columns))


@dataclass(frozen=True)
class MegatronCritic:
    """The critic, on a group of ranks."""

    workers: WorkerGroup
    config: CriticConfig

    def values(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        return self.begin_values(batch).add_to(batch)

    def begin_values(self, batch: PlacedBatch) -> Pass:
        made = self.workers.call(RLWorker.compute_values, batch.shards("critic", TOKENS))
        return Pass(made, lambda batch, made: batch.with_column(VALUES, "critic", made.columns))

    def update(self, batch: PlacedBatch) -> Metrics:
        shards = batch.shards("critic", TOKENS, VALUES, TOKEN_ADVANTAGES)
        # What the policy does not learn from was sampled and scored all the same: the critic learns from all of it.
        totals = loss_totals(shards.plan, batch.samples[NUM_SAMPLED_TOKENS.name])
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
        return _scores_of(self._compute(batch).get())

    def begin_scores(self, batch: PlacedBatch) -> Pass:
        return Pass(self._compute(batch), _with_scores)

    def _compute(self, batch: PlacedBatch) -> Future[Collected]:
        return self.workers.call(RLWorker.compute_scores, batch.shards("reward_model", TOKENS))


def _scores_of(made: Collected) -> np.ndarray:
    return made.samples[SCORES.name].astype(np.float64)


def _with_scores(batch: PlacedBatch, made: Collected) -> PlacedBatch:
    """The batch with the reward model's scores for samples of reward style "model"."""
    is_by_model_S = batch.samples[REWARD_STYLE.name] == "model"
    return batch.with_samples(score=np.where(is_by_model_S, _scores_of(made), batch.samples[SCORE.name]))


def loss_totals(plan: StepPlan, num_loss_tokens_S: np.ndarray) -> list[dict[str, int]]:
    """The loss tokens of each mini-batch over all ranks, and its sequences with at least one of these."""
    totals = []
    for mini_batch in range(plan.num_mini_batches):
        micro_batches = itertools.chain.from_iterable(rank[mini_batch] for rank in plan.micro_batches)
        counts = num_loss_tokens_S[np.fromiter(itertools.chain.from_iterable(micro_batches), np.int64)]
        totals.append({"num_loss_tokens": int(counts.sum()), "num_sequences": int(np.count_nonzero(counts))})
    return totals
