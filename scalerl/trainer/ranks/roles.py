"""Actor, reference, critic and reward model, each on a group of ranks: the same group, or one each.

A training loop of the user (trainer.custom_fit) may rely on them. Batches are values: a method that makes a column
returns the batch with that column, and the tensors that both refer to stay where they are. `begin_` before the name of
a method: the call returns at once, with a `Pass`.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from scalerl.algorithms import get_adv_estimator
from scalerl.algorithms.advantages import TURN_INDEX
from scalerl.algorithms.losses import policy_loss_columns
from scalerl.batch import StepPlan, episodes
from scalerl.batch.columns import (
    EPISODE_LOSS_TOKENS,
    INPUT_IDS,
    LOSS_MASK,
    NUM_LOSS_TOKENS,
    NUM_SAMPLED_TOKENS,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    RESPONSE_MASK,
    RETURNS,
    REWARD_AFTER,
    REWARD_FAILED,
    REWARD_KL,
    REWARD_STYLE,
    REWARDS,
    ROLLOUT_IS_WEIGHTS,
    ROLLOUT_LOGPROBS,
    ROUTED_EXPERTS,
    SAMPLE_INDEX,
    SCORE,
    SCORES,
    SELECTED,
    TOKEN_ADVANTAGES,
    TURN_ADVANTAGES,
    TURN_LENGTHS,
    TURN_REWARDS,
    TURNS_BEFORE,
    UID,
    VALUES,
    Column,
)
from scalerl.batch.jagged import Jagged
from scalerl.batch.turns import Turns
from scalerl.checkpoint.pieces import DIST_CKPT, WrittenFile, write_index
from scalerl.checkpoint.store import CheckpointWriteError
from scalerl.cluster.batch import TOKENS, PlacedBatch
from scalerl.cluster.dispatch import Collected, Future
from scalerl.cluster.worker_group import WorkerGroup
from scalerl.config.schema import ActorConfig, AlgorithmConfig, CriticConfig, RolloutCorrectionConfig
from scalerl.config.schema.actor import PPOModelConfig
from scalerl.errors import RunError, UserError
from scalerl.rollout.servers.reference import ReferenceServer
from scalerl.tracking.metrics import Metric, Metrics, explained_variance_metrics
from scalerl.trainer.ranks.rl_worker import RLWorker
from scalerl.trainer.ranks.run_estimators import ROW_NAMES
from scalerl.trainer.ranks.worker import MegatronWorker
from scalerl.trainer.saving.saves import Writing

# Columns that a loss may need without naming what brings them: `TOKENS`, the old log-probs with the columns of the
# correction, the advantages with the returns; `update_actor` makes the last one.
MADE_ON_RANKS = {
    *(column.name for column in (INPUT_IDS, RESPONSE_MASK, ROLLOUT_LOGPROBS)),
    *(column.name for column in (OLD_LOGPROBS, ROLLOUT_IS_WEIGHTS, LOSS_MASK, TOKEN_ADVANTAGES, RETURNS)),
    SELECTED.name,
}
# Seconds until a rank that still writes is asked again; twice as long each time.
_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 1.0


@dataclass(frozen=True)
class Pass:
    """A forward pass of a model over a batch, which its ranks compute meanwhile.

    Models in pools of their own compute at the same time; the ranks of one pool do their passes one after another, in
    the order in which the passes began.
    add: puts the columns that the pass made into a batch.
    """

    result: Future[Collected]
    add: Callable[[PlacedBatch, Collected], PlacedBatch]

    def add_to(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        """Waits for the pass; returns the batch with its columns, and its metrics. Raises the error of a failed pass.

        batch: that of the pass, which may have more columns by now.
        """
        collected = self.result.get()
        return self.add(batch, collected), collected.metrics


@dataclass(frozen=True)
class TrainedModel:
    """A model that checkpoints hold, with its optimizer.  role: its name on the ranks, and its directory."""

    role: ClassVar[str] = "actor"
    workers: WorkerGroup

    def save(self, directory: str) -> None:
        """Writes weights and optimizer state into an existing directory."""
        self.workers.call(MegatronWorker.save_checkpoint, self.role, directory)

    def begin_save(self, directory: str) -> Writing:
        """Starts a `save` of the current state while the run continues; the result waits until all is written."""
        self.workers.call(MegatronWorker.begin_save_checkpoint, self.role, directory)
        return functools.partial(self._finish, Path(directory))

    def load(self, directory: str) -> None:
        """Reads the files that `save` wrote."""
        self.workers.call(MegatronWorker.load_checkpoint, self.role, directory)

    def _finish(self, directory: Path, given_up: threading.Event) -> None:
        """Waits for all ranks, then raises the first error of any of them; CheckpointWriteError when given up."""
        deadline = time.monotonic() + self.workers.limit(MegatronWorker.written_checkpoint.__name__).seconds
        files: list[WrittenFile] = []
        common: dict[str, Any] = {}
        failures: list[Exception] = []
        # One after the other: they end at about the same time, and each is asked but once when it has ended.
        for rank in range(self.workers.world_size):
            try:
                file, common = self._written(rank, deadline, given_up)
                files.append(file)
            except (RunError, UserError) as error:
                failures.append(error)
        if failures:
            raise failures[0]
        write_index(directory / DIST_CKPT, files, common)

    def _written(self, rank: int, deadline: float, given_up: threading.Event) -> tuple[WrittenFile, dict[str, Any]]:
        look_s = _FIRST_LOOK_S
        while not given_up.is_set():
            answer = self.workers.ask(rank, MegatronWorker.written_checkpoint, self.role)
            if answer is not None:
                return answer
            if time.monotonic() > deadline:
                limit = self.workers.limit(MegatronWorker.written_checkpoint.__name__)
                raise CheckpointWriteError(f"rank {rank} still writes after {limit.key}={limit.seconds:.0f} s")
            given_up.wait(look_s)
            look_s = min(2 * look_s, _LAST_LOOK_S)
        # Whoever gave it up ends Ray now, and a call would start Ray anew.
        raise CheckpointWriteError("the run ended before it was written")


@dataclass(frozen=True)
class MegatronActor(TrainedModel):
    """The policy that is trained."""

    config: ActorConfig
    # The sampler's temperature: log-probs are of softmax(logits / temperature).
    temperature: float
    correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    # Weight in the loss of the KL of a teacher, whose words came with ref_logprobs; 0: there is none.
    distillation_coef: float = 0.0

    def begin_logprobs(self, batch: PlacedBatch) -> Pass:
        """Begins the pass that adds old_logprobs by the current weights, and the columns of the correction.

        With bypass_mode it adds nothing: the sampler's log-probs, which the batch has, are the old ones.
        """
        if self.correction.bypass_mode:
            return Pass(Future(lambda: Collected({}, {}, [])), lambda batch, made: batch)
        made = self.workers.call(
            RLWorker.compute_log_prob,
            batch.shards("actor", TOKENS, *_routed(batch)),
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
        """Adds advantages and returns, one for each token. kl_coef: weight of the KL in the rewards; None: no KL."""
        needs = get_adv_estimator(config.adv_estimator).needs
        columns: list[Column | str] = [REWARD_FAILED, *(name for name in needs if name != TURN_INDEX)]
        of_turns = batch
        if batch.has(TURN_REWARDS):
            turns = Turns.of(batch.samples)
            made = {REWARD_AFTER.name: turns.rewards_after_rows(batch.samples)}
            made |= {TURNS_BEFORE.name: turns.before_rows(batch.samples)}
            of_turns = batch.with_samples(**made)
            columns += [TURN_LENGTHS, TURN_REWARDS, REWARD_AFTER, TURNS_BEFORE]
        else:
            columns += [REWARDS]
        columns += [VALUES] if batch.has(VALUES) else []
        columns += [*self._held_old_logprobs, REF_LOGPROBS] if kl_coef is not None else []
        metrics, _, columns_made = self.workers.call(
            RLWorker.compute_advantages,
            of_turns.shards("actor", TOKENS, *columns),
            config=config,
            kl=None if kl_coef is None else (kl_coef, self._old_logprobs),
        )
        if batch.has(VALUES):
            metrics = explained_variance_metrics(metrics)
        return batch.with_column(TOKEN_ADVANTAGES, "actor", columns_made), metrics

    def spread_turn_advantages(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        """Adds advantages and returns: each token has the advantage of its turn, in the column turn_advantages."""
        shards = batch.shards("actor", TOKENS, TURN_LENGTHS, TURN_REWARDS, TURN_ADVANTAGES)
        metrics, _, columns_made = self.workers.call(RLWorker.spread_turn_advantages, shards)
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
        names += [REF_LOGPROBS] if self.config.use_kl_loss or self.distillation_coef else []
        names += ROW_NAMES if SELECTED.name in needs else []
        return names

    def evaluate_and_update(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        """Adds old_logprobs and makes the update in one forward pass, in steps where `is_one_pass_enough` holds.

        Needs advantages.
        """
        counted, of_episodes = _with_episodes(batch, self.config, NUM_SAMPLED_TOKENS)
        columns = [*_routed(batch), *of_episodes, *self._loss_columns(batch)]
        shards = counted.shards("actor", TOKENS, *columns)
        metrics, _, old_logprobs = self.workers.call(
            RLWorker.evaluate_and_update_actor,
            shards,
            config=self.config,
            temperature=self.temperature,
            totals=loss_totals(shards.plan, batch.samples, NUM_SAMPLED_TOKENS),
            distillation_coef=self.distillation_coef,
        )
        return batch.with_column(OLD_LOGPROBS, "actor", old_logprobs), metrics | self._kl_coef()

    def _kl_coef(self) -> Metrics:
        return {"actor/kl_coef": Metric(self.config.kl_loss_coef, "mean")} if self.config.use_kl_loss else {}

    def update(self, batch: PlacedBatch) -> Metrics:
        """Makes one optimizer update for each mini-batch and epoch. Needs old_logprobs and advantages."""
        counts = NUM_LOSS_TOKENS if batch.has(NUM_LOSS_TOKENS) else NUM_SAMPLED_TOKENS
        counted, of_episodes = _with_episodes(batch, self.config, counts)
        columns = [*_routed(batch), *of_episodes, *self._held_old_logprobs, *self._loss_columns(batch)]
        shards = counted.shards("actor", TOKENS, *columns)
        metrics = self.workers.call(
            RLWorker.update_actor,
            shards,
            config=self.config,
            temperature=self.temperature,
            totals=loss_totals(shards.plan, batch.samples, counts),
            bypass_mode=self.correction.bypass_mode,
            distillation_coef=self.distillation_coef,
        ).metrics
        return metrics | self._kl_coef()


def _routed(batch: PlacedBatch) -> list[Column[Jagged]]:
    """The sampler's choices of experts, in a run whose routers follow them."""
    return [ROUTED_EXPERTS] if batch.has(ROUTED_EXPERTS) else []


def _with_old_logprobs(batch: PlacedBatch, made: Collected) -> PlacedBatch:
    return batch.with_column(OLD_LOGPROBS, "actor", made.columns).with_samples(**made.samples)


@dataclass(frozen=True)
class MegatronReference:
    """The frozen policy model that the KL terms compare the actor with, or the teacher.

    top_k: words of the teacher for each token; 0: none.  server: has the model; None: `workers` have it.
    """

    workers: WorkerGroup
    temperature: float
    top_k: int = 0
    server: ReferenceServer | None = None

    def begin_logprobs(self, batch: PlacedBatch) -> Pass:
        """Begins the pass that adds ref_logprobs; with top_k the teacher's words are in the same column's shards."""
        role = "ref" if self.server is None else "actor"
        if self.server is None:
            shards = batch.shards(role, TOKENS)
            made = self.workers.call(
                RLWorker.compute_ref_log_prob, shards, temperature=self.temperature, top_k=self.top_k
            )
        else:
            shards = batch.shards(role, TOKENS, UID, SAMPLE_INDEX)
            made = self.workers.call(RLWorker.ask_reference, shards, server=self.server, top_k=self.top_k)
        return Pass(made, lambda batch, made: batch.with_column(REF_LOGPROBS, role, made.columns))


@dataclass(frozen=True)
class MegatronCritic(TrainedModel):
    """The value model that is trained."""

    role = "critic"
    config: CriticConfig

    def begin_values(self, batch: PlacedBatch) -> Pass:
        """Begins the pass that adds values, by the current weights."""
        made = self.workers.call(RLWorker.compute_values, batch.shards("critic", TOKENS))
        return Pass(made, lambda batch, made: batch.with_column(VALUES, "critic", made.columns))

    def update(self, batch: PlacedBatch) -> Metrics:
        """Makes one optimizer update for each mini-batch and epoch. Needs values, and advantages of tokens."""
        # What the policy does not learn from was sampled and scored all the same: the critic learns from all of it.
        counted, of_episodes = _with_episodes(batch, self.config, NUM_SAMPLED_TOKENS)
        shards = counted.shards("critic", TOKENS, VALUES, TOKEN_ADVANTAGES, *of_episodes)
        totals = loss_totals(shards.plan, batch.samples, NUM_SAMPLED_TOKENS)
        return self.workers.call(RLWorker.update_critic, shards, config=self.config, totals=totals).metrics


@dataclass(frozen=True)
class MegatronRewardModel:
    """The frozen model that scores samples."""

    workers: WorkerGroup

    def begin_scores(self, batch: PlacedBatch) -> Pass:
        """Begins the pass that replaces the score of samples of reward style "model", and no other."""
        return Pass(self.workers.call(RLWorker.compute_scores, batch.shards("reward_model", TOKENS)), _with_scores)


def _with_scores(batch: PlacedBatch, made: Collected) -> PlacedBatch:
    """The batch with the model's scores; of an episode, that of its last trajectory, and the rewards of its turns."""
    is_by_model_S = batch.samples[REWARD_STYLE.name] == "model"
    episode_S = episodes.of_rows(batch.samples)
    last_E = np.append(episodes.starts(batch.samples)[1:], len(episode_S)) - 1
    scores_S = made.samples[SCORES.name].astype(np.float64)[last_E[episode_S]]
    if batch.has(TURN_REWARDS):
        of_turns_S = np.array([sum(rewards) for rewards in batch.samples[TURN_REWARDS.name]], np.float64)
        scores_S += episodes.sums(batch.samples, of_turns_S)[episode_S]
    return batch.with_samples(score=np.where(is_by_model_S, scores_S, batch.samples[SCORE.name]))


def _with_episodes(
    batch: PlacedBatch, config: PPOModelConfig, counts: Column[np.ndarray]
) -> tuple[PlacedBatch, list[Column]]:
    """The batch with the loss tokens of each episode, and that column, where a loss divides by them and an episode has
    several rows; else the batch alone.  counts: the column with the loss tokens of rows."""
    counts_E = episodes.sums(batch.samples, batch.samples[counts.name])
    episode_S = episodes.of_rows(batch.samples)
    if config.loss_agg_mode != "seq-mean-token-mean" or len(counts_E) == len(episode_S):
        return batch, []
    return batch.with_samples(**{EPISODE_LOSS_TOKENS.name: counts_E[episode_S]}), [EPISODE_LOSS_TOKENS]


def loss_totals(plan: StepPlan, samples: Mapping[str, np.ndarray], counts: Column[np.ndarray]) -> list[dict[str, int]]:
    """The loss tokens of each mini-batch over all ranks, and its episodes with at least one of these.

    counts: the column of `samples` with the loss tokens of rows.
    """
    counts_S, episode_S, totals = samples[counts.name], episodes.of_rows(samples), []
    for mini_batch in range(plan.num_mini_batches):
        micro_batches = itertools.chain.from_iterable(rank[mini_batch] for rank in plan.micro_batches)
        rows = np.fromiter(itertools.chain.from_iterable(micro_batches), np.int64)
        num_episodes = len(np.unique(episode_S[rows][counts_S[rows] > 0]))
        totals.append({"num_loss_tokens": int(counts_S[rows].sum()), "num_sequences": num_episodes})
    return totals
