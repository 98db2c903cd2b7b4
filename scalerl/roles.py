"""What the step loop calls. controller/ implements these over Ray; a loop needs nothing else of it.

A `batch` here is opaque to the loop: it holds one row of metadata per sample (`.samples`) and references to the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

Metrics = dict[str, Any]


class Batch(Protocol):
    """samples: column name -> [S], one row per sample."""

    @property
    def samples(self) -> dict[str, np.ndarray]: ...

    def with_samples(self, **columns: np.ndarray) -> Any: ...


class Rollout(Protocol):
    """The sampler and the reward manager behind it."""

    def begin(self, groups: Sequence[Any], **early_end: Any) -> Any:
        """Starts n samples for each group of training prompts."""

    def finish(self, generation: Any) -> Any:
        """Scored samples of what was begun, where the time went, and what an early end left."""

    def greedy_scores(self, samples: Any) -> tuple[np.ndarray, Metrics]:
        """[S]: score of one greedy response to each sample's prompt."""

    def validate(self, *, step: int) -> tuple[Any, Metrics]:
        """Scored samples for every validation prompt, sampled as val_kwargs say."""

    def place(self, samples: Any, plans: Mapping[str, Any]) -> Batch:
        """The samples' tokens on the data-parallel ranks that the actor's plan names. plans: role -> its plan."""

    def sync_weights(self, policy_version: int) -> Metrics:
        """Serve the actor's weights from now on, and stamp samples with this version."""

    def faults(self) -> Metrics:
        """What went wrong and was mended since the last call."""


class Actor(Protocol):
    """The policy that trains."""

    def logprobs(self, batch: Batch) -> tuple[Batch, Metrics]:
        """The batch with old_logprobs, scored by the weights as they are, and with what corrects the sampler's."""

    def reward_kl(self, batch: Batch, kind: str) -> np.ndarray:
        """[S], summed over the sampled tokens of each sample. The batch holds old_logprobs and ref_logprobs."""

    def token_advantages(self, batch: Batch, config: Any, *, kl_coef: float | None) -> tuple[Batch, Metrics]:
        """The batch with advantages and returns of single tokens."""

    def update(self, batch: Batch) -> Metrics:
        """One optimizer update per mini-batch and epoch. The batch holds old_logprobs and advantages."""


class Reference(Protocol):
    """The frozen policy that the KL term compares with."""

    def logprobs(self, batch: Batch) -> tuple[Batch, Metrics]:
        """The batch with ref_logprobs."""


class Critic(Protocol):
    """The value model that trains."""

    def values(self, batch: Batch) -> tuple[Batch, Metrics]:
        """The batch with values, by the weights as they are."""

    def update(self, batch: Batch) -> Metrics:
        """One optimizer update per mini-batch and epoch. The batch holds values and returns."""


class RewardModel(Protocol):
    """The frozen model that scores samples."""

    def scores(self, batch: Batch) -> np.ndarray:
        """[S], of every sample."""
