"""Metrics, per data source, of several responses to each prompt: for validation and for `scalerl eval`."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scalerl.tracking.metrics.failed_samples import CORRECT, PREDICTION, with_wrong_extras

log = logging.getLogger(__name__)

REWARD = "reward"
NUM_FAILED = "num_failed"
# Draws that estimate a majority vote, which has no closed form.
NUM_RESAMPLES = 1000
SEED = 42

# Values by metric, e.g. best@4/mean.
Values = dict[str, float]


def validation_metrics(
    data_sources: Sequence[str] | np.ndarray,
    uids: Sequence[object] | np.ndarray,
    scores: Sequence[float] | np.ndarray,
    extras: Sequence[Mapping[str, Any]] | np.ndarray | None = None,
    failed: Sequence[bool] | np.ndarray | None = None,
) -> dict[str, float]:
    """The values of `source_metrics` as {val-core|val-aux}/{data_source}/{variable}/{metric}, for the trackers.

    In val-core: mean@N, best@N/mean, maj@N/mean and pass@N of the reward and of `acc`, N being the largest number of
    responses to a prompt of the data source; with `failed` also NUM_FAILED, their number, without a variable. Arguments
    and errors as those of `source_metrics`. Warns of an extra that is a number in some responses alone.
    """
    metrics: dict[str, float] = {}
    for source, variables in source_metrics(data_sources, uids, scores, extras, failed).items():
        for variable, values in variables.items():
            n = next(iter(values)).partition("@")[2]
            core = {f"mean@{n}", f"best@{n}/mean", f"maj@{n}/mean", f"pass@{n}"}
            for name, value in values.items():
                section = "val-core" if variable in (REWARD, CORRECT) and name in core else "val-aux"
                metrics[f"{section}/{source}/{variable}/{name}"] = value
    for line in _without_metric(data_sources, extras, failed):
        log.warning(line)
    if failed is not None:
        counts = Counter(source for source, is_failed in zip(data_sources, failed, strict=True) if is_failed)
        metrics |= {f"val-core/{source}/{NUM_FAILED}": float(counts[source]) for source in dict.fromkeys(data_sources)}
    return metrics


def _without_metric(
    data_sources: Sequence[str] | np.ndarray,
    extras: Sequence[Mapping[str, Any]] | np.ndarray | None,
    failed: Sequence[bool] | np.ndarray | None,
) -> Iterator[str]:
    """A line for each extra that has no metric because only some of a data source's responses have the number."""
    totals: Counter[str] = Counter()
    numbers: Counter[tuple[str, str]] = Counter()
    for i, (source, extra) in enumerate(zip(data_sources, [] if extras is None else extras, strict=False)):
        if failed is None or not failed[i]:
            totals[source] += 1
            numbers.update((source, name) for name, value in extra.items() if isinstance(value, int | float))
    for (source, name), count in numbers.items():
        if count < totals[source]:
            yield (
                f"validation of {source}: {totals[source] - count} of {totals[source]} responses have no number "
                f"{name!r} beside their score, so it has no metric; let the reward function return it with every score"
            )


def source_metrics(
    data_sources: Sequence[str] | np.ndarray,
    uids: Sequence[object] | np.ndarray,
    scores: Sequence[float] | np.ndarray,
    extras: Sequence[Mapping[str, Any]] | np.ndarray | None = None,
    failed: Sequence[bool] | np.ndarray | None = None,
) -> dict[str, dict[str, Values]]:
    """Metrics of several responses to each prompt, by data source, variable and metric.

    All arguments [S], one entry per response; responses to one prompt share (data_source, uid). extras: the other
    values that the reward function returned. failed: the responses without a score, whose values count as wrong
    (`failed_samples`; their scores do already). Variables: `reward` (the score), and each extra that is a number in
    every response of the data source that has a score; one that is called `reward`, too, is `extra/reward`.

    N is the largest number of responses to a prompt; n and k are 2, 4, 8, ... below N, and N. Each value is a mean over
    prompts, every prompt counting once, of
        mean@N, std@N: mean and standard deviation (population) of its responses' values.
        best@n/{mean,std}, worst@n/{mean,std}: mean and standard deviation of the largest, smallest value of n responses
            drawn with replacement: the bootstrap over all possible draws, in closed form.
        maj@n/{mean,std}: the same of the value that the most frequent `pred` among n has, over NUM_RESAMPLES draws of a
            fixed seed. Ties: the one drawn first. Only where every response of the source has a `pred`.
        pass@k: chance that one of k different responses is correct, 1 - C(c wrong, k) / C(all, k) (arXiv 2107.03374).
            Only for values 0 and 1, and where every prompt has k responses.
    Only mean@N where N is 1.

    Raises ValueError for different lengths and for a score that is not finite.
    """
    extras = [{}] * len(scores) if extras is None else extras
    if not len(data_sources) == len(uids) == len(scores) == len(extras):
        raise ValueError(
            f"validation metrics of {len(data_sources)} data sources, {len(uids)} uids, {len(scores)} scores and "
            f"{len(extras)} extras"
        )
    if failed is not None:
        extras = with_wrong_extras(extras, data_sources, failed)
    sources: dict[str, _Source] = {}
    for source, uid, score, extra in zip(data_sources, uids, scores, extras, strict=True):
        if not np.isfinite(score):
            raise ValueError(f"validation metrics: score of a response to prompt {uid} of {source!r} is {score}")
        sources.setdefault(str(source), _Source()).add(uid, float(score), extra)
    return {name: source.metrics() for name, source in sources.items()}


@dataclass
class _Source:
    """The responses of one data source.  rows: indices into scores and extras of each prompt's responses, by uid."""

    rows: dict[object, list[int]] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)
    extras: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, uid: object, score: float, extra: Mapping[str, Any]) -> None:
        self.rows.setdefault(uid, []).append(len(self.scores))
        self.scores.append(score)
        self.extras.append(extra)

    def metrics(self) -> dict[str, Values]:
        votes = self._votes()
        return {
            variable: _over_prompts([values[rows] for rows in self.rows.values()], votes)
            for variable, values in self._variables().items()
        }

    def _variables(self) -> dict[str, np.ndarray]:
        """The variables by name, each as [responses] float64."""
        variables = {REWARD: np.array(self.scores)}
        for name in dict.fromkeys(key for extra in self.extras for key in extra):
            values = [extra.get(name) for extra in self.extras]
            # A reward's result has finite numbers only (`rewards.ScoreResult`).
            if all(isinstance(value, int | float) for value in values):
                variables[f"extra/{name}" if name == REWARD else name] = np.array(values, dtype=np.float64)
        return variables

    def _votes(self) -> list[np.ndarray] | None:
        """Numbers of the predictions per prompt, equal for equal predictions; None if a response has no prediction."""
        if not all(extra.get(PREDICTION) is not None for extra in self.extras):
            return None
        codes_by_prediction: dict[str, int] = {}
        codes = [
            codes_by_prediction.setdefault(str(extra[PREDICTION]), len(codes_by_prediction)) for extra in self.extras
        ]
        return [np.array(codes)[rows] for rows in self.rows.values()]


def _over_prompts(values: list[np.ndarray], votes: list[np.ndarray] | None) -> Values:
    """The metrics of one variable, as means over prompts.  values, votes: an array per prompt, [responses]."""
    largest = max(map(len, values))
    metrics = {f"mean@{largest}": _mean([responses.mean() for responses in values])}
    if largest == 1:
        return metrics
    metrics[f"std@{largest}"] = _mean([responses.std() for responses in values])
    is_binary = all(np.isin(responses, (0.0, 1.0)).all() for responses in values)
    for n in _sizes(largest):
        metrics |= _mean_and_std(f"best@{n}", [best_of(responses, n) for responses in values])
        metrics |= _mean_and_std(f"worst@{n}", [_worst_of(responses, n) for responses in values])
        if votes is not None:
            pairs = zip(values, votes, strict=True)
            drawn = [majority_of(responses, vote, n, [SEED, row, n]) for row, (responses, vote) in enumerate(pairs)]
            metrics |= _mean_and_std(f"maj@{n}", drawn)
        if is_binary and min(map(len, values)) >= n:
            metrics[f"pass@{n}"] = _mean([pass_at(len(responses), int(responses.sum()), n) for responses in values])
    return metrics


def _sizes(largest: int) -> list[int]:
    """The sizes n: 2, 4, 8, ... below the largest, and the largest."""
    return [2**power for power in range(1, (largest - 1).bit_length())] + [largest]


def best_of(values: np.ndarray, n: int) -> tuple[float, float]:
    """Mean and standard deviation of the largest of n values drawn with replacement from values [N]."""
    share = np.arange(len(values) + 1) / len(values)
    # The largest draw is at most the i-th smallest value exactly if all n draws are.
    chance = np.diff(share**n)
    ordered = np.sort(values)
    mean = float(chance @ ordered)
    return mean, math.sqrt(float(chance @ (ordered - mean) ** 2))


def _worst_of(values: np.ndarray, n: int) -> tuple[float, float]:
    mean, std = best_of(-values, n)
    return -mean + 0.0, std  # + 0.0: no "-0"


def majority_of(values: np.ndarray, votes: np.ndarray, n: int, seed: Sequence[int]) -> tuple[float, float]:
    """Mean and standard deviation of the majority's mean value among n draws.  values, votes: [N]."""
    drawn_RN = np.random.default_rng(seed).integers(0, len(values), (NUM_RESAMPLES, n))
    candidates, numbered = np.unique(votes, return_inverse=True)
    votes_RN = numbered[drawn_RN]
    # The candidates of each draw have their own bins.
    bins_RN = votes_RN + len(candidates) * np.arange(NUM_RESAMPLES)[:, None]
    counts_RN = np.bincount(bins_RN.ravel(), minlength=NUM_RESAMPLES * len(candidates))[bins_RN]
    won_RN = votes_RN == np.take_along_axis(votes_RN, counts_RN.argmax(axis=1)[:, None], axis=1)
    results_R = (values[drawn_RN] * won_RN).sum(axis=1) / won_RN.sum(axis=1)
    return float(results_R.mean()), float(results_R.std())


def pass_at(num_responses: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k different responses is correct."""
    return 1.0 - math.comb(num_responses - num_correct, k) / math.comb(num_responses, k)


def _mean_and_std(name: str, means_and_stds: list[tuple[float, float]]) -> Values:
    means, stds = zip(*means_and_stds, strict=True)
    return {f"{name}/mean": _mean(means), f"{name}/std": _mean(stds)}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
