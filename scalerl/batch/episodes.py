"""Episodes: the rows of a batch that have one score. S rows, each a trajectory; E episodes.

A sample is one trajectory, or several: branches, sub-agents, a conversation that was compacted. What one agent does in
a sample is an episode. It is scored once, compared once with those of the same agent in the group's other samples, and
counts once in a mean, however many trajectories it has. Its rows follow one another.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_COUNTS = ("response_length", "num_sampled_tokens", "num_loss_tokens", "num_turns")


def sample_starts(samples: Mapping[str, np.ndarray]) -> np.ndarray:
    """The first row of each sample, ascending.  samples: column -> [S]; without a sample_index each row is a sample."""
    return _starts(samples, "uid", "sample_index")


def starts(samples: Mapping[str, np.ndarray]) -> np.ndarray:
    """[E] the first row of each episode, ascending.  samples: as `sample_starts`."""
    return _starts(samples, "uid", "sample_index", "agent")


def of_rows(samples: Mapping[str, np.ndarray]) -> np.ndarray:
    """[S] the number of each row's episode."""
    is_first_S = np.zeros(_num_rows(samples), dtype=np.int64)
    is_first_S[starts(samples)] = 1
    return np.cumsum(is_first_S) - 1


def sums(samples: Mapping[str, np.ndarray], values_S: np.ndarray) -> np.ndarray:
    """[E] the sum of a value over the rows of each episode."""
    starts_E = starts(samples)
    return values_S if len(starts_E) == len(values_S) else np.add.reduceat(values_S, starts_E)


def _starts(samples: Mapping[str, np.ndarray], *names: str) -> np.ndarray:
    num_rows = _num_rows(samples)
    if "sample_index" not in samples or not num_rows:
        return np.arange(num_rows)
    is_first_S = np.zeros(num_rows, dtype=bool)
    is_first_S[0] = True
    for name in names:
        if name in samples:
            is_first_S[1:] |= samples[name][1:] != samples[name][:-1]
    return np.flatnonzero(is_first_S)


def _num_rows(samples: Mapping[str, np.ndarray]) -> int:
    return next((len(column) for column in samples.values()), 0)


def columns(samples: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Column -> [E]: tokens after the prompt and turns are sums over an episode's rows, the others are its first row's.

    Score, reward and what came with them are the same in all rows of an episode.
    """
    starts_E = starts(samples)
    return {name: sums(samples, column) if name in _COUNTS else column[starts_E] for name, column in samples.items()}


def groups(samples: Mapping[str, np.ndarray]) -> np.ndarray:
    """[S] int64: equal for the rows whose episodes are compared with each other, those of one agent in one group.

    It is the uid where no agent has a name.
    """
    uids_S = samples["uid"]
    agents_S = samples.get("agent")
    if agents_S is None or not any(agents_S):
        return uids_S
    number_of: dict[tuple[int, str], int] = {}
    pairs = zip(uids_S.tolist(), agents_S.tolist(), strict=True)
    return np.array([number_of.setdefault(pair, len(number_of)) for pair in pairs], dtype=np.int64)
