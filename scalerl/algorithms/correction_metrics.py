"""Metrics of an off-policy correction, the same for any split of the whole sequences over ranks.

Each rank calls the functions of this module, `merge_metrics` merges what they return over ranks, and
`rollout_corr_metrics` is called once on the merged metrics. A rank without a token reports no mean and no extreme.
docs/metrics.md defines the keys.  Dims: T packed tokens, S sequences, N sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from scalerl.algorithms.sequences import Sequences
from scalerl.tracking.metrics.metric import Metric

_PREFIX = "rollout_corr/"
_IS = f"{_PREFIX}rollout_is"
_RS = f"{_PREFIX}rollout_rs"
_IS_SQUARE = "rollout_corr_partial/rollout_is_square"
_SEQ_SQUARE = "rollout_corr_partial/rollout_is_seq_square"


def weight_metrics(
    log_ratio_U: Tensor, weights_U: Tensor, weights_N: Tensor, sequences: Sequences, lower: float | None, upper: float
) -> dict[str, Metric]:
    """Metrics rollout_corr/rollout_is_* except both std and the effective sample size, which need merged sums.

    U: units that have one weight each: tokens, or sequences with a token.  lower None: weights over upper were
    truncated to upper.
    """
    means_S = sequences.nonempty(sequences.mean(weights_N))
    high_U = log_ratio_U > math.log(upper)
    low_U = log_ratio_U < math.log(1.0 / upper if lower is None else lower)
    return {
        **_mean_and_extremes(_IS, weights_U),
        **_mean(_IS_SQUARE, weights_U.square()),
        **_mean(f"{_IS}_ratio_fraction_high", high_U),
        **_mean(f"{_IS}_ratio_fraction_low", low_U),
        **_mean(f"{_IS}_oob_ratio", high_U if lower is None else high_U | low_U),
        **_mean_and_extremes(f"{_IS}_seq", means_S),
        **_mean(_SEQ_SQUARE, means_S.square()),
        **_max(f"{_IS}_seq_max_deviation", (means_S - 1.0).abs()),
    }


def rejection_test_metrics(
    option: str, statistic_U: Tensor, low_U: Tensor, high_U: Tensor, reject_N: Tensor, sequences: Sequences
) -> dict[str, Metric]:
    """Metrics rollout_corr/rollout_rs_{option}_* of one rejection test.

    U: tokens for token_* options, else sequences with a token.
    """
    prefix = f"{_RS}_{option}"
    return {
        **_mean_and_extremes(prefix, statistic_U),
        **_mean(f"{prefix}_fraction_high", high_U),
        **_mean(f"{prefix}_fraction_low", low_U),
        **_masked_fractions(prefix, reject_N, sequences),
    }


def veto_metrics(catastrophic_N: Tensor, sequences: Sequences) -> dict[str, Metric]:
    """Metrics rollout_corr/rollout_is_veto_fraction and rollout_is_catastrophic_token_fraction of the veto."""
    return {
        **_mean(f"{_IS}_veto_fraction", sequences.nonempty(sequences.any(catastrophic_N))),
        **_mean(f"{_IS}_catastrophic_token_fraction", catastrophic_N),
    }


def rejection_metrics(keep_N: Tensor, sequences: Sequences) -> dict[str, Metric]:
    """Metrics rollout_corr/rollout_rs_{masked_fraction,seq_masked_fraction,num_dropped}, of all tests and the veto."""
    dropped_S = sequences.nonempty(~sequences.any(keep_N))
    return {
        **_masked_fractions(_RS, ~keep_N, sequences),
        f"{_RS}_num_dropped": Metric(float(dropped_S.sum()), "sum"),
    }


def rollout_corr_metrics(metrics: Mapping[str, Metric | float]) -> dict[str, Metric | float]:
    """Replaces the merged partial sums in `metrics` by the metrics they stand for; all others are kept as they are.

    rollout_corr/rollout_is_std, rollout_is_seq_std: population standard deviation of the weights, and of the samples'
    mean weights, before batch normalization.
    rollout_corr/rollout_is_eff_sample_size: (sum w)^2 / (n sum w^2), in (0, 1]; absent when all weights are 0.
    """
    finished: dict[str, Metric | float] = {}
    for prefix, square_key in ((_IS, _IS_SQUARE), (f"{_IS}_seq", _SEQ_SQUARE)):
        if square_key not in metrics:
            continue
        mean, square = (_value(metrics[key]) for key in (f"{prefix}_mean", square_key))
        variance = square - mean**2
        # Rounding can leave the difference of two equal numbers below 0; NaN stays NaN, it is the finding.
        finished[f"{prefix}_std"] = math.sqrt(0.0 if variance < 0 else variance)
        if prefix == _IS and square != 0:
            finished[f"{_IS}_eff_sample_size"] = mean**2 / square
    return {key: metric for key, metric in metrics.items() if key not in (_IS_SQUARE, _SEQ_SQUARE)} | finished


def _masked_fractions(prefix: str, reject_N: Tensor, sequences: Sequences) -> dict[str, Metric]:
    """Metrics of the share of rejected tokens, and of the share of sequences with at least one rejected token."""
    return {
        **_mean(f"{prefix}_masked_fraction", reject_N),
        **_mean(f"{prefix}_seq_masked_fraction", sequences.nonempty(sequences.any(reject_N))),
    }


def _mean_and_extremes(prefix: str, values: Tensor) -> dict[str, Metric]:
    if not len(values):
        return {}
    return {
        **_mean(f"{prefix}_mean", values),
        f"{prefix}_max": Metric(float(values.max()), "max"),
        f"{prefix}_min": Metric(float(values.min()), "min"),
    }


def _max(key: str, values: Tensor) -> dict[str, Metric]:
    return {key: Metric(float(values.max()), "max")} if len(values) else {}


def _mean(key: str, values: Tensor) -> dict[str, Metric]:
    return {key: Metric(float(values.double().mean()), "mean", float(len(values)))} if len(values) else {}


def _value(metric: Metric | float) -> float:
    return metric.value if isinstance(metric, Metric) else float(metric)
