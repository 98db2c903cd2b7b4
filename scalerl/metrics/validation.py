"""Metrics of a validation pass, per data source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def validation_metrics(data_sources: Sequence[str], uids: Sequence[int], scores: Sequence[float]) -> dict[str, float]:
    """val-core/{data_source}/reward/mean@N; with N > 1 also best@N/mean there and val-aux/{data_source}/reward/std@N.

    All arguments [S], one entry per response; responses to one prompt share (data_source, uid). N is the largest number
    of responses to a prompt. Every value is a mean over prompts, each prompt counting once: of its mean score, its best
    score, and the standard deviation (population) of its scores.
    Raises ValueError for different lengths and for a score that is not finite.
    """
    if not len(data_sources) == len(uids) == len(scores):
        raise ValueError(
            f"validation_metrics: {len(data_sources)} data sources, {len(uids)} uids and {len(scores)} scores"
        )
    prompts: dict[str, dict[object, list[float]]] = {}
    for source, uid, score in zip(data_sources, uids, scores, strict=True):
        if not np.isfinite(score):
            raise ValueError(f"validation_metrics: score of a response to prompt {uid} of {source!r} is {score}")
        prompts.setdefault(str(source), {}).setdefault(uid, []).append(float(score))
    metrics: dict[str, float] = {}
    for source, groups in prompts.items():
        n = max(len(group) for group in groups.values())
        metrics[f"val-core/{source}/reward/mean@{n}"] = _mean(np.mean, groups)
        if n > 1:
            metrics[f"val-core/{source}/reward/best@{n}/mean"] = _mean(np.max, groups)
            metrics[f"val-aux/{source}/reward/std@{n}"] = _mean(np.std, groups)
    return metrics


def _mean(of_prompt: Callable[[list[float]], float], groups: dict[object, list[float]]) -> float:
    return float(np.mean([of_prompt(group) for group in groups.values()]))
