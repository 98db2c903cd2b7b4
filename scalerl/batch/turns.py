"""Turns: what the policy sampled at a time, and the reward of each.  S rows; K turns of all rows, in order; T tokens.

The turns of an episode (`episodes`) have numbers, from its first row to its last. The reward of an episode is the sum
of the rewards of its turns, and of what is no turn's: that comes after the last turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from scalerl.batch import episodes
from scalerl.batch.columns import REWARDS, TURN_LENGTHS, TURN_REWARDS
from scalerl.batch.jagged import Jagged


def column_of(values_S: Sequence[Sequence[float]]) -> np.ndarray:
    """[S] object: the values of each row's turns as a tuple."""
    column = np.empty(len(values_S), dtype=object)
    for row, values in enumerate(values_S):
        column[row] = tuple(values)
    return column


@dataclass(frozen=True)
class Turns:
    """The turns of rows.  lengths_S, rewards_S: the columns turn_lengths and turn_rewards, a tuple for each row."""

    lengths_S: np.ndarray
    rewards_S: np.ndarray

    @classmethod
    def of(cls, samples: Mapping[str, np.ndarray]) -> Turns:
        """The turns of all rows of a batch.  samples: column -> [S]."""
        return cls(samples[TURN_LENGTHS.name], samples[TURN_REWARDS.name])

    @cached_property
    def counts_S(self) -> np.ndarray:
        return np.array([len(row) for row in self.lengths_S], dtype=np.int64)

    @cached_property
    def rows_K(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.counts_S)), self.counts_S)

    @cached_property
    def lengths_K(self) -> np.ndarray:
        """[K] the number of tokens of each turn."""
        return np.array([length for row in self.lengths_S for length in row], dtype=np.int64)

    @cached_property
    def rewards_K(self) -> np.ndarray:
        """[K] the reward of each turn."""
        return np.array([reward for row in self.rewards_S for reward in row], dtype=np.float64)

    def of_rows(self, values_K: np.ndarray) -> np.ndarray:
        """[S] object: the values of each row's turns as a tuple."""
        ends_S = np.cumsum(self.counts_S)
        return column_of([part.tolist() for part in np.split(values_K, ends_S[:-1])] if len(ends_S) else [])

    def numbers(self, before_S: np.ndarray) -> np.ndarray:
        """[K] the number of each turn in its episode.  before_S: turns of the episode in earlier rows."""
        first_S = np.cumsum(self.counts_S) - self.counts_S
        return np.arange(len(self.rows_K)) + (before_S - first_S)[self.rows_K]

    def before_rows(self, samples: Mapping[str, np.ndarray]) -> np.ndarray:
        """[S] the number of turns that a row's episode has in the rows before it."""
        return _sums_so_far(samples, self.counts_S) - self.counts_S

    def rewards_after_rows(self, samples: Mapping[str, np.ndarray]) -> np.ndarray:
        """[S] the reward of the episode less that of the turns up to the row's last one."""
        return samples[REWARDS.name] - _sums_so_far(samples, np.array([sum(row) for row in self.rewards_S], float))

    def returns(self, samples: Mapping[str, np.ndarray], gamma: float) -> np.ndarray:
        """[K] the discounted reward of the episode from a turn on: R_k = r_k + gamma R_k', k' the turn after it.

        What is no turn's is added to the reward of the last turn.
        """
        episode_K = episodes.of_rows(samples)[self.rows_K]
        rewards_E = samples[REWARDS.name][episodes.starts(samples)]
        own_E = rewards_E - np.bincount(episode_K, self.rewards_K, minlength=len(rewards_E))
        returns_K = self.rewards_K.copy()
        for turn in reversed(range(len(returns_K))):
            is_last = turn + 1 == len(returns_K) or episode_K[turn + 1] != episode_K[turn]
            returns_K[turn] += own_E[episode_K[turn]] if is_last else gamma * returns_K[turn + 1]
        return returns_K

    def on_tokens(self, values_K: np.ndarray, mask: Jagged, *, elsewhere: float = 0) -> Tensor:
        """[T] the value of the turn that sampled the token; `elsewhere` where the policy sampled nothing.

        mask: the column response_mask of these rows.
        """
        is_sampled_T = mask.values != 0
        values_R = torch.from_numpy(np.repeat(values_K, self.lengths_K))
        return torch.full((len(is_sampled_T),), elsewhere, dtype=values_R.dtype).masked_scatter(is_sampled_T, values_R)

    def rewards_on_tokens(self, mask: Jagged) -> Tensor:
        """[T] float32: the reward of each turn at its last token; that of a turn without a token at the row's last one
        before it, if there is one.  mask: as `on_tokens`."""
        ends_K = np.cumsum(self.lengths_K)
        num_before_S = np.array([0, *np.cumsum([sum(row) for row in self.lengths_S])])[:-1]
        has_token_K = ends_K > num_before_S[self.rows_K]
        rewards_R = np.zeros(int(self.lengths_K.sum()))
        np.add.at(rewards_R, ends_K[has_token_K] - 1, self.rewards_K[has_token_K])
        rewards_T = torch.zeros(len(mask.values))
        return rewards_T.masked_scatter(mask.values != 0, torch.from_numpy(rewards_R).float())


def _sums_so_far(samples: Mapping[str, np.ndarray], values_S: np.ndarray) -> np.ndarray:
    """[S] the sum of a value over the rows of the episode up to this one."""
    sums_S, episode_S = values_S.copy(), episodes.of_rows(samples)
    for row in range(1, len(sums_S)):
        if episode_S[row] == episode_S[row - 1]:
            sums_S[row] += sums_S[row - 1]
    return sums_S
