"""Metrics of a step's samples that need only their per-sample columns. S: samples."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

REQUIRED = ("score", "prompt_length", "response_length", "finish_reason")


def compute_data_metrics(
    samples: Mapping[str, np.ndarray],
    advantages_S: np.ndarray | None = None,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    returns_S: np.ndarray | None = None,
) -> dict[str, float]:
    """The metrics critic/{score,rewards,advantages,returns}/*, prompt_length/*, response_length/*, response/* and
    num_turns/*.

    samples: [S] columns score, prompt_length, response_length (tokens), finish_reason; optional rewards (score after
    penalties; default score), prompt_length_before (tokens before truncation), num_sampled_tokens (of response_length;
    default all of them) and num_turns.
    advantages_S, returns_S: one value for all sampled tokens of a sample; returns default to advantages, which is what
    outcome estimators define. Statistics are over sampled tokens, so a sample counts as often as it has some.
    max_*_length: the configured limits.
    Raises ValueError for no samples, a missing column, a column of another length, or a length over its limit.
    """
    _check(samples, advantages_S, returns_S)
    for name, limit in (("prompt_length", max_prompt_length), ("response_length", max_response_length)):
        longest = int(samples[name].max())
        if limit is not None and longest > limit:
            raise ValueError(f"{name} of sample {int(samples[name].argmax())} is {longest}: over the limit of {limit}")
    lengths_S = np.asarray(samples["response_length"])
    sampled_S = np.asarray(samples.get("num_sampled_tokens", lengths_S))
    aborted_S = (np.asarray(samples["finish_reason"]) == "abort") | (lengths_S == 0)
    limited_S = np.asarray(samples["finish_reason"]) == "length"
    done_S = ~aborted_S
    scores_S = np.asarray(samples["score"], dtype=np.float64)
    rewards_S = np.asarray(samples.get("rewards", scores_S), dtype=np.float64)

    metrics = _stats("critic/score", scores_S[done_S]) | _stats("critic/rewards", rewards_S[done_S])
    if advantages_S is not None:
        metrics |= _token_stats("critic/advantages", advantages_S, sampled_S)
        metrics |= _token_stats("critic/returns", advantages_S if returns_S is None else returns_S, sampled_S)
    metrics |= _stats("prompt_length", samples["prompt_length"])
    if (clipped := _prompt_clip_ratio(samples, max_prompt_length)) is not None:
        metrics["prompt_length/clip_ratio"] = clipped
    metrics |= _stats("response_length", lengths_S)
    metrics["response_length/clip_ratio"] = float(limited_S.mean())
    if done_S.any():
        metrics |= _stats("response_length_non_aborted", lengths_S[done_S])
        metrics["response_length_non_aborted/clip_ratio"] = float(limited_S[done_S].mean())
    metrics["response/aborted_ratio"] = float(aborted_S.mean())
    if "num_sampled_tokens" in samples and lengths_S.any():
        metrics["response/sampled_ratio"] = float(sampled_S.sum() / lengths_S.sum())
    if "num_turns" in samples:
        metrics |= _stats("num_turns", samples["num_turns"])
    return metrics


def _check(samples: Mapping[str, np.ndarray], advantages_S: np.ndarray | None, returns_S: np.ndarray | None) -> None:
    missing = [name for name in REQUIRED if name not in samples]
    if missing:
        raise ValueError(f"compute_data_metrics: samples lack {', '.join(missing)}; they have {sorted(samples)}")
    num_samples = len(samples["score"])
    if num_samples == 0:
        raise ValueError("compute_data_metrics: the step has no samples")
    columns = {**{name: samples[name] for name in REQUIRED}, "advantages": advantages_S, "returns": returns_S}
    for name, column in columns.items():
        if column is not None and np.shape(column) != (num_samples,):
            raise ValueError(f"compute_data_metrics: {name} has shape {np.shape(column)}, expected ({num_samples},)")


def _stats(prefix: str, values: np.ndarray) -> dict[str, float]:
    if len(values) == 0:
        return {}
    return {
        f"{prefix}/mean": float(np.mean(values)),
        f"{prefix}/max": float(np.max(values)),
        f"{prefix}/min": float(np.min(values)),
    }


def _token_stats(prefix: str, values_S: np.ndarray, lengths_S: np.ndarray) -> dict[str, float]:
    """Statistics over tokens, each of which has its sample's value; samples without tokens do not count."""
    has_tokens_S = lengths_S > 0
    if not has_tokens_S.any():
        return {}
    values, lengths = np.asarray(values_S, dtype=np.float64)[has_tokens_S], lengths_S[has_tokens_S]
    return _stats(prefix, values) | {f"{prefix}/mean": float(np.average(values, weights=lengths))}


def _prompt_clip_ratio(samples: Mapping[str, np.ndarray], max_prompt_length: int | None) -> float | None:
    """Share of truncated prompts; None if neither their lengths before truncation nor the limit are known.

    Without the lengths before truncation it is an upper bound: the share of prompts that fill the limit.
    """
    lengths_S = np.asarray(samples["prompt_length"])
    if "prompt_length_before" in samples:
        return float(np.mean(np.asarray(samples["prompt_length_before"]) > lengths_S))
    return None if max_prompt_length is None else float(np.mean(lengths_S >= max_prompt_length))
