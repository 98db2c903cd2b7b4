"""What the loop calls of its models and its sampler; controller/ implements it, a loop of your own relies on it.

A method that makes a column returns the batch with it: batches are values, and what they refer to stays where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import numpy as np

from scalerl.balance import StepPlan
from scalerl.cluster.batch import BatchRef, PlacedBatch
from scalerl.config.schema import AlgorithmConfig
from scalerl.controller.sampling.groups import Enough, SampleGroup
from scalerl.controller.sampling.rollout import Finished, Generation
from scalerl.controller.training.background_save import Writing
from scalerl.metrics import Metric

Metrics = dict[str, Metric]


class Rollout(Protocol):
    """The sampler and the reward manager behind it, which hold the samples; the loop has one row of each."""

    def begin(self, groups: Sequence[SampleGroup], *, enough: Enough | None = None, carry: bool = False) -> Generation:
        """Starts n samples for each group of training prompts; returns at once.

        enough: when to end before all are finished.  carry: what is unfinished then goes on when it is asked for again.
        """
        ...

    def finish(self, generation: Generation) -> Finished:
        """Waits. Scored samples of what was begun, where the time went, and the groups that an early end left."""
        ...

    def join(self, parts: Sequence[tuple[BatchRef, Sequence[int]]]) -> BatchRef:
        """Rows of several batches, in order, as one; the batches are gone then."""
        ...

    def forget(self, groups: Sequence[SampleGroup]) -> None:
        """Groups that an early end left, and that will not be asked for again."""
        ...

    def greedy_scores(self, samples: BatchRef) -> tuple[np.ndarray, Metrics]:
        """[S]: score of one greedy response to each sample's prompt."""
        ...

    def validate(self, *, step: int) -> tuple[BatchRef, Metrics]:
        """Scored samples of every validation prompt, drawn as val_kwargs say."""
        ...

    def release_device(self) -> None:
        """After generation: the trainer has the device to itself."""
        ...

    def lend_device(self) -> AbstractContextManager[None]:
        """Inside the block, between two generations, the trainer has room for what a save or a load brings there."""
        ...

    def place(self, samples: BatchRef, plans: Mapping[str, StepPlan]) -> PlacedBatch:
        """The samples' tokens on the data-parallel ranks that the first plan names. plans: role -> its plan."""
        ...

    def sync_weights(self, policy_version: int) -> Metrics:
        """Serve the actor's weights from now on, and stamp samples with this version."""
        ...

    def texts(
        self, samples: BatchRef, rows: Sequence[int], dataset: str, *, with_special_tokens: bool
    ) -> list[tuple[str, str, str]]:
        """(prompt, response, ground truth) of these rows.  dataset: whose prompts they are, `train` or `val`."""
        ...

    def dump(self, samples: BatchRef, batch: PlacedBatch, path: Path) -> None:
        """One parquet of the samples, with what the trainer made of them. batch: the same rows."""
        ...

    def drop(self, samples: BatchRef) -> None:
        """The samples are not needed any more."""
        ...

    def faults(self) -> Metrics:
        """What went wrong and was mended since the last call."""
        ...


class Actor(Protocol):
    """The policy that trains."""

    def logprobs(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        """The batch with old_logprobs, by the weights as they are, and with what corrects the sampler's."""
        ...

    def worst_tokens(self, batch: PlacedBatch) -> dict[str, np.ndarray]:
        """Of each sample's token whose two log-probs differ most, columns [S]; {} where nothing compares them."""
        ...

    def reward_kl(self, batch: PlacedBatch, kind: str) -> np.ndarray:
        """[S], summed over the sampled tokens of each sample. The batch has old_logprobs and ref_logprobs."""
        ...

    def token_advantages(
        self, batch: PlacedBatch, config: AlgorithmConfig, *, kl_coef: float | None
    ) -> tuple[PlacedBatch, Metrics]:
        """The batch with advantages and returns of single tokens. kl_coef: weight of the KL in the rewards, if any."""
        ...

    def update(self, batch: PlacedBatch) -> Metrics:
        """One optimizer update per mini-batch and epoch. The batch has old_logprobs and advantages."""
        ...

    def evaluate_and_update(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        """`logprobs` and `update` in one forward pass, of a step of which `is_one_pass_enough` says so. The batch has
        advantages."""
        ...

    def save(self, directory: str) -> None:
        """Weights and optimizer, into an existing directory."""
        ...

    def begin_save(self, directory: str) -> Writing:
        """As `save`, of what they are now, while the run goes on; what it returns waits until all is written."""
        ...

    def load(self, directory: str) -> None:
        """What `save` wrote."""
        ...


class Reference(Protocol):
    """The frozen policy that the KL term compares with."""

    def logprobs(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        """The batch with ref_logprobs."""
        ...


class Critic(Protocol):
    """The value model that trains."""

    def values(self, batch: PlacedBatch) -> tuple[PlacedBatch, Metrics]:
        """The batch with values, by the weights as they are."""
        ...

    def update(self, batch: PlacedBatch) -> Metrics:
        """One optimizer update per mini-batch and epoch. The batch has values, and advantages of tokens."""
        ...

    def save(self, directory: str) -> None:
        """Weights and optimizer, into an existing directory."""
        ...

    def begin_save(self, directory: str) -> Writing:
        """As `save`, of what they are now, while the run goes on; what it returns waits until all is written."""
        ...

    def load(self, directory: str) -> None:
        """What `save` wrote."""
        ...


class RewardModel(Protocol):
    """The frozen model that scores samples."""

    def scores(self, batch: PlacedBatch) -> np.ndarray:
        """[S] float64, of every sample."""
        ...
