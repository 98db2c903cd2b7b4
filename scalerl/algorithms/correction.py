"""Off-policy correction: weights and masks for tokens to which sampler and trainer give different probabilities.

Log-ratio of a token: d = old_logprobs - rollout_logprobs = log(p_trainer / p_sampler). In terms of the configuration:

    token TIS       rollout_is=token      rollout_is_threshold=C          w = min(e^d, C)
    sequence TIS    rollout_is=sequence   rollout_is_threshold=C          w = min(e^sum(d), C)
    geometric TIS   rollout_is=geometric  rollout_is_threshold=C          w = min(e^mean(d), C)
    IcePop          rollout_is=token      rollout_is_threshold=[a, b]     w = e^d inside [a, b], else 0
    sequence MIS    rollout_is=sequence   rollout_is_threshold=[a, b]     w = e^sum(d) inside [a, b], else 0
    rejection       rollout_rs=...        rollout_rs_threshold=...        the token or response leaves the mask
    veto            rollout_token_veto_threshold=v                        a response with any e^d < v leaves the mask
    bypass          bypass_mode=true                                      old_logprobs := rollout_logprobs, w = 1

A weight of 0 keeps the token in the loss's divisor; rejection takes it out of the mask.
Dims: T packed tokens, S sequences, N sampled tokens (response_mask not 0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from scalerl.algorithms.correction_metrics import (
    rejection_metrics,
    rejection_test_metrics,
    veto_metrics,
    weight_metrics,
)
from scalerl.algorithms.correction_rejection import outside_bounds, rejection_statistic
from scalerl.algorithms.correction_weights import aggregate_log_ratio, masked_weights, truncated_weights
from scalerl.algorithms.masked import masked_mean
from scalerl.algorithms.sequences import Sequences
from scalerl.config.correction import is_bounds, rs_bounds
from scalerl.config.schema import RolloutCorrectionConfig
from scalerl.tracking.metrics.metric import Metric


@dataclass(frozen=True)
class Correction:
    """Weights and mask that correct the policy loss of one rank's sequences; no tensor has a gradient.

    weights_T: [T] float32, factor of each token's policy loss; 0 where mask_T is False.
    mask_T: [T] bool, response_mask less what was rejected.
    num_loss_tokens_S: [S] int64, tokens of each sequence in mask_T; the loss divides by these counts.
    old_logprobs_T: [T], what the policy loss compares the updated policy with; 0 where the response mask is 0.
    metrics: to be merged over ranks by `merge_metrics` and then finished by `rollout_corr_metrics`.
    """

    weights_T: Tensor
    mask_T: Tensor
    num_loss_tokens_S: Tensor
    old_logprobs_T: Tensor
    metrics: dict[str, Metric]


def correct(
    rollout_logprobs_T: Tensor,
    old_logprobs_T: Tensor | None,
    response_mask_T: Tensor,
    cu_seqlens: Tensor,
    config: RolloutCorrectionConfig,
    *,
    group: dist.ProcessGroup | None = None,
) -> Correction:
    """Computes the importance weights and the mask of whole sequences, as `config` says.

    With the configuration's defaults (all off) every weight is 1 and the mask stays as it is.

    rollout_logprobs_T, old_logprobs_T: [T] float, of one temperature, without top-p or top-k renormalization; what they
    are where the mask is 0 does not matter.  old_logprobs_T None: only with bypass_mode.
    response_mask_T: [T] bool or 0/1.  cu_seqlens: [S + 1] integers; tokens past its last are padding.
    group: data-parallel ranks over which rollout_is_batch_normalize takes the mean; all of them must call.
    Computed in float64 and in log space: any finite log-probs give finite weights. A NaN log-prob of a sampled token is
    never rejected and makes its weight NaN, so that the update shows it.
    Raises ValueError for shapes that differ, for missing old_logprobs_T, and for thresholds that do not fit.
    """
    _same_shapes(rollout_logprobs_T, old_logprobs_T, response_mask_T)
    sequences = Sequences(response_mask_T, cu_seqlens)
    if config.bypass_mode:
        old_logprobs_T = rollout_logprobs_T
    elif old_logprobs_T is None:
        raise ValueError("old_logprobs of the trainer are needed for a correction; only bypass_mode=true goes without")
    old_N = sequences.select(old_logprobs_T.detach())
    log_ratio_N = old_N.double() - sequences.select(rollout_logprobs_T.detach()).double()
    weights_N, metrics = _weights(log_ratio_N, sequences, config, group)
    keep_N, keep_metrics = _keep(log_ratio_N, sequences, config)
    return Correction(
        weights_T=sequences.scatter(torch.where(keep_N, weights_N, 0.0).float()),
        mask_T=sequences.scatter(keep_N),
        num_loss_tokens_S=sequences.sum(keep_N.long()),
        old_logprobs_T=sequences.scatter(old_N),
        metrics=metrics | keep_metrics,
    )


def _weights(
    log_ratio_N: Tensor, sequences: Sequences, config: RolloutCorrectionConfig, group: dist.ProcessGroup | None
) -> tuple[Tensor, dict[str, Metric]]:
    """[N] float64 importance weights before rejection, and their metrics."""
    level = config.rollout_is
    if level is None:
        return torch.ones_like(log_ratio_N), {}
    lower, upper = is_bounds(config)
    log_ratio = aggregate_log_ratio(log_ratio_N, sequences, level)
    weights = truncated_weights(log_ratio, upper) if lower is None else masked_weights(log_ratio, lower, upper)
    if level == "token":
        weights_N, units, unit_weights = weights, log_ratio, weights
    else:
        weights_N, units, unit_weights = sequences.of_tokens(weights), *map(sequences.nonempty, (log_ratio, weights))
    metrics = weight_metrics(units, unit_weights, weights_N, sequences, lower, upper)
    if config.rollout_is_batch_normalize:
        mean = float(masked_mean(unit_weights, torch.ones_like(unit_weights), group=group))
        # Where every weight is 0 there is nothing to scale.
        factor = mean if mean != 0 else 1.0
        weights_N = weights_N / factor
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = Metric(factor, "mean")
    return weights_N, metrics


def _keep(
    log_ratio_N: Tensor, sequences: Sequences, config: RolloutCorrectionConfig
) -> tuple[Tensor, dict[str, Metric]]:
    """[N] bool, True for tokens that pass every test and whose sequence is not vetoed; and the metrics of it."""
    keep_N = torch.ones_like(log_ratio_N, dtype=torch.bool)
    metrics: dict[str, Metric] = {}
    for option, bounds in rs_bounds(config).items():
        statistic = rejection_statistic(log_ratio_N, sequences, option)
        low, high = outside_bounds(statistic, option, bounds)
        reject_N = low | high
        if not option.startswith("token"):
            reject_N = sequences.of_tokens(reject_N)
            statistic, low, high = map(sequences.nonempty, (statistic, low, high))
        metrics |= rejection_test_metrics(option, statistic, low, high, reject_N, sequences)
        keep_N &= ~reject_N
    veto = config.rollout_token_veto_threshold
    if veto is not None:
        catastrophic_N = log_ratio_N < math.log(veto)
        metrics |= veto_metrics(catastrophic_N, sequences)
        keep_N &= ~sequences.of_tokens(sequences.any(catastrophic_N))
    if config.rollout_rs is not None or veto is not None:
        metrics |= rejection_metrics(keep_N, sequences)
    return keep_N, metrics


def _same_shapes(rollout_logprobs_T: Tensor, old_logprobs_T: Tensor | None, response_mask_T: Tensor) -> None:
    shapes = {"rollout_logprobs": rollout_logprobs_T.shape, "response_mask": response_mask_T.shape}
    if old_logprobs_T is not None:
        shapes["old_logprobs"] = old_logprobs_T.shape
    if len(set(shapes.values())) > 1 or response_mask_T.ndim != 1:
        described = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(f"a correction needs columns of one shape [T]: {described}")
