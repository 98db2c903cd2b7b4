"""Metrics of the difference between the trainer's log-probs and the sampler's: divergences, perplexities, extremes.

`mismatch_metrics` is called on each data-parallel rank, for any split of whole sequences, and `merge_metrics` merges.
`rollout_diff_sums` is called there, too, for any split of the tokens; `rollout_diff_metrics` once, on the merged sums.
Dims: T packed tokens, S sequences, N sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from scalerl.tracking.metrics.metric import Metric

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "rollout_corr/"
# Bound of exponents, which keeps means finite. A perplexity is at most about the vocabulary's size, far below e^20.
_LOG_BOUND = 20.0
_PARTIAL = "rollout_diff_partial/"
_DIFF = "training/rollout_probs_diff"
# Below this variance of the probabilities a correlation is rounding noise.
_MIN_VARIANCE = 1e-12


def mismatch_metrics(
    rollout_logprobs_T: Tensor, old_logprobs_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor
) -> dict[str, Metric]:
    """The metrics rollout_corr/* of one rank's sampled tokens, in float64; none without tokens.

    rollout_logprobs_T, old_logprobs_T: [T] float.  mask_T: [T] bool or 0/1, true on sampled tokens.
    cu_seqlens: [S + 1] integers; tokens past its last are padding.  docs/metrics.md defines the keys.
    Both log-probs must be of the same distribution: the sampler's temperature, without top-p or top-k renormalization.
    Any finite log-probs give finite metrics; a NaN of a sampled token makes its means NaN.
    Source: k1, k3: http://joschu.net/blog/kl-approx.html ; chi2: https://richardli.xyz/rl-collapse
    """
    import torch

    keep_T, sequence_N = _sampled(mask_T, cu_seqlens)
    if not len(sequence_N):
        return {}
    rollout_N, old_N = rollout_logprobs_T[keep_T].double(), old_logprobs_T[keep_T].double()
    log_ratio_N = old_N - rollout_N
    num_sequences = len(cu_seqlens) - 1
    counts_S = torch.bincount(sequence_N, minlength=num_sequences)
    has_tokens_S = counts_S > 0

    def per_sequence(values_N: Tensor) -> Tensor:
        return values_N.new_zeros(num_sequences).index_add_(0, sequence_N, values_N)[has_tokens_S]

    lengths = counts_S[has_tokens_S]
    rollout_log_ppl, old_log_ppl = (-per_sequence(values_N) / lengths for values_N in (rollout_N, old_N))
    log_ratio = per_sequence(log_ratio_N)
    log_ppl_diff = -log_ratio / lengths
    high_N = log_ratio_N.clamp(max=_LOG_BOUND)
    means = {
        "kl": -log_ratio_N,
        # expm1 keeps the digits that exp(d) - 1 - d loses for small d.
        "k3_kl": torch.expm1(high_N) - high_N,
        "chi2_token": torch.expm1(2 * high_N),
        "chi2_seq": torch.expm1(2 * log_ratio.clamp(max=_LOG_BOUND)),
        "training_log_ppl": old_log_ppl,
        "rollout_log_ppl": rollout_log_ppl,
        "training_ppl": old_log_ppl.clamp(max=_LOG_BOUND).exp(),
        "rollout_ppl": rollout_log_ppl.clamp(max=_LOG_BOUND).exp(),
        "ppl_ratio": log_ppl_diff.clamp(max=_LOG_BOUND).exp(),
        "log_ppl_diff": log_ppl_diff,
        "log_ppl_abs_diff": log_ppl_diff.abs(),
    }
    extremes = {"log_ppl_diff": log_ppl_diff, "seq_log_ratio": log_ratio, "token_log_ratio": log_ratio_N}
    return (
        {_PREFIX + key: Metric(float(values.mean()), "mean", float(len(values))) for key, values in means.items()}
        | {f"{_PREFIX}{key}_max": Metric(float(values.max()), "max") for key, values in extremes.items()}
        | {f"{_PREFIX}{key}_min": Metric(float(values.min()), "min") for key, values in extremes.items()}
    )


def largest_differences(
    rollout_logprobs_T: Tensor, old_logprobs_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Finds each sequence's sampled token whose log-probs differ most; returns (difference_S, position_S).

    difference_S: [S] float64, max |old_logprobs - rollout_logprobs|, NaN if any is NaN; 0 without a sampled token.
    position_S: [S] int64, that token's position in its sequence (prompt included), the first of equals; -1 without
    a sampled token.
    Arguments as `mismatch_metrics`.
    """
    import torch

    keep_T, sequence_N = _sampled(mask_T, cu_seqlens)
    difference_N = (old_logprobs_T[keep_T].double() - rollout_logprobs_T[keep_T].double()).abs()
    # A NaN, also that of two infinities of one sign, counts as the largest difference.
    rank_N = torch.where(difference_N.isnan(), torch.inf, difference_N)
    num_sequences, num_tokens = len(cu_seqlens) - 1, len(mask_T)
    worst_S = rank_N.new_full((num_sequences,), -1.0).scatter_reduce_(0, sequence_N, rank_N, "amax")
    token_N = torch.arange(num_tokens, device=mask_T.device)[keep_T]
    token_N = torch.where(rank_N == worst_S[sequence_N], token_N, num_tokens)
    token_S = token_N.new_full((num_sequences,), num_tokens).scatter_reduce_(0, sequence_N, token_N, "amin")
    has_token_S = token_S < num_tokens
    difference_T = rank_N.new_zeros(num_tokens + 1)
    difference_T[:-1][keep_T] = difference_N
    position_S = torch.where(has_token_S, token_S - cu_seqlens[:-1].to(token_S), -1)
    return difference_T[token_S].cpu().numpy(), position_S.cpu().numpy()


def worst_samples(difference_S: np.ndarray, k: int) -> np.ndarray:
    """Rows of the k largest differences or fewer, as int64, largest first, NaN before all numbers, equals by row.

    A row with difference 0 is not an outlier, and is left out.
    """
    rank_S = np.where(np.isnan(difference_S), np.inf, difference_S)
    # NaN goes before infinity, with which it would tie.
    order_S = np.lexsort((np.arange(len(rank_S)), ~np.isnan(difference_S), -rank_S))
    return order_S[rank_S[order_S] > 0][: max(k, 0)]


def _sampled(mask_T: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The mask of sampled tokens as [T] bool, and the sequence of each sampled token as [N] int64."""
    import torch

    lengths_S = cu_seqlens.diff().to(mask_T.device)
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths_S), device=mask_T.device), lengths_S)
    keep_T = mask_T != 0
    keep_T[len(sequence_T) :] = False
    return keep_T, sequence_T[keep_T[: len(sequence_T)]]


def rollout_diff_sums(rollout_logprobs_T: Tensor, old_logprobs_T: Tensor, mask_T: Tensor) -> dict[str, Metric]:
    """Partial sums over one rank's sampled tokens, in float64.

    All arguments [T]; mask_T is true on sampled tokens. Both log-probs must be of the same distribution: the sampler's
    temperature, without top-p or top-k renormalization.
    """
    keep_T = mask_T.bool()
    rollout = rollout_logprobs_T[keep_T].double().exp()
    trainer = old_logprobs_T[keep_T].double().exp()
    difference = (rollout - trainer).abs()
    sums = {
        "num": float(keep_T.sum()),
        "diff": float(difference.sum()),
        "diff2": float(difference.square().sum()),
        "x": float(rollout.sum()),
        "y": float(trainer.sum()),
        "xx": float(rollout.square().sum()),
        "yy": float(trainer.square().sum()),
        "xy": float((rollout * trainer).sum()),
    }
    metrics = {_PARTIAL + name: Metric(value, "sum") for name, value in sums.items()}
    metrics[_PARTIAL + "max"] = Metric(float(difference.max()) if len(difference) else 0.0, "max")
    return metrics


def rollout_diff_metrics(metrics: Mapping[str, Metric | float]) -> dict[str, Metric | float]:
    """Replaces the merged partial sums in `metrics` by the metrics they stand for; all others are kept as they are.

    training/rollout_probs_diff_{mean,max,std}: statistics of |p_rollout - p_old| over sampled tokens (std: population).
    training/rollout_probs_diff_valid: 1 if there were tokens; else 0, and the others are absent.
    training/rollout_actor_probs_pearson_corr: correlation of p_rollout and p_old; absent when either does not vary.
    """
    parts = {key.removeprefix(_PARTIAL): metric for key, metric in metrics.items() if key.startswith(_PARTIAL)}
    rest = {key: metric for key, metric in metrics.items() if not key.startswith(_PARTIAL)}
    if not parts:
        return rest
    sums = {name: metric.value if isinstance(metric, Metric) else float(metric) for name, metric in parts.items()}
    n = sums["num"]
    if n == 0:
        return rest | {f"{_DIFF}_valid": 0.0}
    mean = sums["diff"] / n
    variance = sums["diff2"] / n - mean**2
    diff_metrics = {
        f"{_DIFF}_valid": 1.0,
        f"{_DIFF}_mean": mean,
        f"{_DIFF}_max": sums["max"],
        # Rounding can leave the difference of two equal numbers below 0; NaN stays NaN, it is the finding.
        f"{_DIFF}_std": math.sqrt(0.0 if variance < 0 else variance),
    }
    mean_x, mean_y = sums["x"] / n, sums["y"] / n
    var_x, var_y = sums["xx"] / n - mean_x**2, sums["yy"] / n - mean_y**2
    if var_x > _MIN_VARIANCE and var_y > _MIN_VARIANCE:
        correlation = (sums["xy"] / n - mean_x * mean_y) / math.sqrt(var_x * var_y)
        diff_metrics["training/rollout_actor_probs_pearson_corr"] = max(-1.0, min(1.0, correlation))
    return rest | diff_metrics
