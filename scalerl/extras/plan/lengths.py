"""The lengths of a step's responses: a mean, and the limit at which the longest are cut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

# Share of data.max_response_length that a response is assumed to have on average.
RESPONSE_FRAC = 0.5
# Lengths that stand for all samples of a step.
_QUANTILES = 32
_EULER = 0.5772


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and responses. Every running response ends with the same probability at each token.

    This is the distribution that assumes least, of a known mean and limit: exponential, cut at the limit.
    prompt: of each prompt.  mean, limit: of responses.
    """

    prompt: float
    mean: float
    limit: int

    @cached_property
    def _scale(self) -> float:
        """The mean that responses had without the limit."""
        low, high = self.mean / 2, 1e4 * self.limit
        for _ in range(100):
            middle = math.sqrt(low * high)
            below = -middle * math.expm1(-self.limit / middle) < self.mean
            low, high = (middle, high) if below else (low, middle)
        return high

    def running(self, tokens: np.ndarray) -> np.ndarray:
        """The share of responses that are longer than so many tokens."""
        return np.where(tokens < self.limit, np.exp(-tokens / self._scale), 0.0)

    def longest_of(self, samples: int) -> float:
        """The expected length of the longest of so many responses."""
        return min(self.limit, self._scale * (math.log(max(1, samples)) + _EULER))

    @cached_property
    def age(self) -> float:
        """The tokens that a response has on average, seen at any time while it runs."""
        tokens = np.arange(0.5, 256) * self.limit / 256
        running = self.running(tokens)
        return float((tokens * running).sum() / running.sum())

    @cached_property
    def samples(self) -> np.ndarray:
        """Tokens of prompt and response of samples that stand for all."""
        shares = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
        return self.prompt + np.minimum(self.limit, -self._scale * np.log1p(-shares))
