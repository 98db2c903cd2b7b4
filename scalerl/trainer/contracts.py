"""Interfaces of the models and the sampler that a training loop calls.

A training loop of the user (trainer.custom_fit) may rely on them. A method that computes a column returns the batch
with that column: batches are values, and the tensors that they refer to stay where they are. `begin_` before the name
of a method: the call returns at once, with a `Pass`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from scalerl.batch import StepPlan
from scalerl.cluster.batch import HeldRows, PlacedBatch
from scalerl.cluster.dispatch import Collected, Future
from scalerl.config.schema import AlgorithmConfig
from scalerl.rollout.sampling.groups import EarlyEnd, SampleGroup
from scalerl.rollout.sampling.rollout import Finished, Generation
from scalerl.tracking.metrics import Metrics
from scalerl.trainer.ranks.worker import Writing


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


class Rollout(Protocol):
    """The sampler and its reward manager, which hold the samples; the training loop sees one row per sample."""

    def begin(
        self, groups: Sequence[SampleGroup], *, enough: EarlyEnd | None = None, carry: bool = False
    ) -> Generation:
        """Starts to sample n responses for each group of training prompts; returns at once.

        enough: when to stop before all groups are finished.  carry: unfinished samples are continued when their group
            is sampled again.
        """
        ...

    def finish(self, generation: Generation) -> Finished:
        """Waits for a generation; returns its scored samples, its metrics and the groups that were left unfinished."""
        ...

    def join(self, batches: Sequence[tuple[HeldRows, Sequence[int]]]) -> HeldRows:
        """Joins rows of several batches, in order, into one batch; the batches must not be used afterwards."""
        ...

    def forget(self, groups: Sequence[SampleGroup]) -> None:
        """Forgets unfinished groups, which will not be sampled again."""
        ...

    def greedy_scores(self, samples: HeldRows) -> tuple[np.ndarray, Metrics]:
        """The reward [S] of one greedy response to each sample's prompt, NaN where that failed, and metrics."""
        ...

    def validate(self, *, step: int) -> tuple[HeldRows, Metrics]:
        """Draws samples for every validation prompt by rollout.val_kwargs, and scores them."""
        ...

    def release_device(self) -> None:
        """Frees the device after generation, so that the trainer has it to itself."""
        ...

    def lend_device(self) -> AbstractContextManager[None]:
        """Frees device memory for a save or a load of the trainer inside the block, between two generations."""
        ...

    def place(self, samples: HeldRows, plans: Mapping[str, StepPlan]) -> PlacedBatch:
        """Places the samples' tokens on the data-parallel ranks that the first plan names. plans: by role."""
        ...

    def sync_weights(self, policy_version: int) -> Metrics:
        """Sends the actor's weights to the servers; samples drawn from now on carry this policy version."""
        ...

    def texts(
        self, samples: HeldRows, rows: Sequence[int], dataset: str, *, with_special_tokens: bool
    ) -> list[tuple[str, str, str]]:
        """The texts (prompt, response, ground truth) of these rows.  dataset: that of the prompts, `train` or `val`."""
        ...

    def dump(self, samples: HeldRows, batch: PlacedBatch, path: Path) -> None:
        """Writes samples and trainer columns as parquet: a file, or a directory of parts with several workers.

        batch: holds the trainer's columns of the same rows.
        """
        ...

    def drop(self, samples: HeldRows) -> None:
        """Frees the samples, which are no longer needed."""
        ...

    def faults(self) -> Metrics:
        """Metrics of the faults that were repaired since the last call."""
        ...


class Actor(Protocol):
    """The policy model that is trained."""

    def logprobs(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        """Adds old_logprobs by the current weights, and the columns that correct the sampler's log-probs."""
        ...

    def begin_logprobs(self, batch: PlacedBatch) -> Pass:
        """Begins `logprobs`."""
        ...

    def worst_tokens(self, batch: PlacedBatch) -> dict[str, np.ndarray]:
        """Columns [S] about the token of each sample whose two log-probs differ most; {} if they were not compared."""
        ...

    def reward_kl(self, batch: PlacedBatch, kind: str) -> np.ndarray:
        """The KL [S], summed over the sampled tokens of each sample. Needs old_logprobs and ref_logprobs."""
        ...

    def token_advantages(
        self, batch: PlacedBatch, config: AlgorithmConfig, *, kl_coef: float | None
    ) -> tuple[PlacedBatch, Metrics]:
        """Adds advantages and returns, one per token. kl_coef: weight of the KL in the rewards; None: no KL."""
        ...

    def update(self, batch: PlacedBatch) -> Metrics:
        """Makes one optimizer update per mini-batch and epoch. Needs old_logprobs and advantages."""
        ...

    def evaluate_and_update(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        """Does `logprobs` and `update` in one forward pass, for steps where `is_one_pass_enough` holds.

        Needs advantages.
        """
        ...

    def save(self, directory: str) -> None:
        """Writes weights and optimizer state into an existing directory."""
        ...

    def begin_save(self, directory: str) -> Writing:
        """Starts a `save` of the current state while the run continues; the result waits until all is written."""
        ...

    def load(self, directory: str) -> None:
        """Reads the files that `save` wrote."""
        ...


class Reference(Protocol):
    """The frozen policy model that the KL term compares the actor with."""

    def logprobs(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        """Adds ref_logprobs to the batch."""
        ...

    def begin_logprobs(self, batch: PlacedBatch) -> Pass:
        """Begins `logprobs`."""
        ...


class Critic(Protocol):
    """The value model that is trained."""

    def values(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        """Adds values to the batch, by the current weights."""
        ...

    def begin_values(self, batch: PlacedBatch) -> Pass:
        """Begins `values`."""
        ...

    def update(self, batch: PlacedBatch) -> Metrics:
        """Makes one optimizer update per mini-batch and epoch. Needs values, and advantages per token."""
        ...

    def save(self, directory: str) -> None:
        """Writes weights and optimizer state into an existing directory."""
        ...

    def begin_save(self, directory: str) -> Writing:
        """Starts a `save` of the current state while the run continues; the result waits until all is written."""
        ...

    def load(self, directory: str) -> None:
        """Reads the files that `save` wrote."""
        ...


class RewardModel(Protocol):
    """The frozen model that scores samples."""

    def scores(self, batch: PlacedBatch) -> np.ndarray:
        """The score of every sample, [S] float64."""
        ...

    def begin_scores(self, batch: PlacedBatch) -> Pass:
        """Begins to score; the pass replaces the score of samples of reward style "model", and no other."""
        ...
