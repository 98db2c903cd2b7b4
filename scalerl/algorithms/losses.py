"""Policy losses per token, and the weights that turn them into one number.

loss = sum_t weights_t * loss_t. The weights hold the only division, by counts of the whole mini-batch, so micro-batches
and data-parallel ranks add up to the same loss however the mini-batch is split into whole sequences.
Dims: T packed tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from scalerl.algorithms.registry import Registry
from scalerl.base.user_code import on_forget
from scalerl.config.names import POLICY_LOSSES, REFERENCE_LOSSES
from scalerl.config.schema import LOSS_AGG_MODES, ActorConfig
from scalerl.tracking.metrics.metric import Metric

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]

_REGISTRY: Registry[PolicyLoss] = Registry(POLICY_LOSSES)
get_policy_loss = _REGISTRY.get
policy_loss_names = _REGISTRY.names

# The argument that is no column, `LossSequences`, and the column that `covariance.select_tokens` makes.
SEQUENCES, SELECTED = "sequences", "selected"
REF_LOGPROBS = "ref_logprobs"
TEACHER_LOGPROBS, LOGPROBS_OF_TEACHER_IDS = "teacher_logprobs", "logprobs_of_teacher_ids"
EPISODE_LOSS_TOKENS = "episode_loss_tokens"

# exp(20) = 4.9e8: far beyond any clip range, far from overflow.
LOG_RATIO_BOUND = 20.0


def register_policy_loss(name: str, *, needs: tuple[str, ...] = ()) -> Callable[[PolicyLoss], PolicyLoss]:
    """Decorator of fn(logprobs_T, old_logprobs_T, advantages_T, config) -> (loss_T, {metric: values_T}).

    needs: further arguments, passed by name: "sequences" (a `LossSequences`), or names of columns ([T, ...] each).
        A column is one of the step's (`batch.columns`; ref_logprobs makes a run have a reference model), or a number
        that the reward function returns, or extra_info of the data has, under that name. A column of samples has the
        sample's value at each of its tokens.
    Tokens without weight hold 0 in all columns. Metrics have no gradient; a metric's mean over loss tokens is logged.
    The loss is aggregated by loss_agg_mode afterwards.
    """
    arguments = ("logprobs_T", "old_logprobs_T", "advantages_T", "config")
    register = _REGISTRY.register(name, arguments=arguments, needs=needs)

    def add(function: PolicyLoss) -> PolicyLoss:
        register(function)
        if REF_LOGPROBS in needs:
            REFERENCE_LOSSES.add(name)
            on_forget(function, lambda: REFERENCE_LOSSES.discard(name))
        return function

    return add


def policy_loss_needs(name: str) -> tuple[str, ...]:
    """The further arguments that a registered policy loss needs."""
    return _REGISTRY.traits(name)["needs"]


def policy_loss_columns(name: str) -> tuple[str, ...]:
    """The columns among the further arguments of a registered policy loss."""
    return tuple(need for need in policy_loss_needs(name) if need != SEQUENCES)


@dataclass(frozen=True)
class LossSequences:
    """The whole sequences of a micro-batch, for losses whose ratio is that of a sequence.

    keep_T: [T] bool, tokens with a weight.  sequence_T: [T] int64, index of each token's sequence; num_sequences for
    tokens past the last one.
    """

    keep_T: Tensor
    sequence_T: Tensor
    num_sequences: int

    def mean(self, values_T: Tensor) -> Tensor:
        """[T] float64: mean of values over the kept tokens of each token's sequence, with gradient; 0 for none."""
        kept_T = torch.where(self.keep_T, values_T, 0.0).double()
        sums, counts = (
            torch.zeros(self.num_sequences + 1, dtype=torch.float64, device=values_T.device).index_add(
                0, self.sequence_T, column_T
            )
            for column_T in (kept_T, self.keep_T.double())
        )
        return (sums / counts.clamp(min=1.0))[self.sequence_T]


def clip_bounds(config: ActorConfig) -> tuple[float, float]:
    """The clip range (low, high) of the configuration: the ratio is clipped to [1 - low, 1 + high].

    clip_ratio sets both; clip_ratio_low and clip_ratio_high, when not null, override their side.
    """
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def bounded_log_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """[T] logprobs - old_logprobs, clamped to [-20, 20]; a token beyond the bounds has no gradient through it."""
    return (logprobs_T - old_logprobs_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@register_policy_loss("vanilla")
def vanilla(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss with a clip range per side and dual clip.

    r = exp(clamp(logprobs - old_logprobs, -20, 20));  l = max(-A r, -A clip(r, 1 - low, 1 + high));
    where A < 0: l = min(l, -A clip_ratio_c).
    All inputs [T]. Returns ([T] loss, {name: [T] values without gradient}):
    actor/pg_clipfrac: 1 where the clipped term is the larger; actor/pg_clipfrac_lower: 1 where dual clip cuts;
    actor/ppo_kl: -log r.
    Raises ValueError when clip_ratio_c is not over 1.
    Source: PPO (arXiv 1707.06347) eq. 7; dual clip: arXiv 1912.09729 eq. 5; clip per side: arXiv 2503.14476.
    """
    low, high = clip_bounds(config)
    bound = config.clip_ratio_c
    if not bound > 1.0:
        raise ValueError(
            f"actor.clip_ratio_c={bound} must be over 1 (3.0 is usual): at 1 it would cut unchanged tokens"
        )
    log_ratio_T = bounded_log_ratio(logprobs_T, old_logprobs_T)
    ratio_T = log_ratio_T.exp()
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1.0 - low, 1.0 + high)
    ppo_T = torch.maximum(plain_T, clipped_T)
    ceiling_T = -advantages_T * bound
    loss_T = torch.where(advantages_T < 0, torch.minimum(ppo_T, ceiling_T), ppo_T)
    return loss_T, {
        "actor/pg_clipfrac": (clipped_T > plain_T).detach().to(loss_T.dtype),
        "actor/pg_clipfrac_lower": ((advantages_T < 0) & (ppo_T > ceiling_T)).detach().to(loss_T.dtype),
        "actor/ppo_kl": -log_ratio_T.detach(),
    }


def check_loss_counts(
    loss_agg_mode: str,
    num_loss_tokens: int,
    num_sequences: int,
    loss_scale_factor: float | None = None,
    *,
    section: str = "actor",
) -> None:
    """Raises ValueError for an unknown loss_agg_mode, a scale that it lacks, or a mini-batch without loss tokens.

    section: the configuration section that loss_agg_mode is in.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(f"{section}.loss_agg_mode={loss_agg_mode!r}: no such mode; known are {list(LOSS_AGG_MODES)}")
    if loss_agg_mode == "seq-mean-token-sum-norm" and not (
        isinstance(loss_scale_factor, int | float) and loss_scale_factor > 0
    ):
        raise ValueError(
            f"{section}.loss_scale_factor={loss_scale_factor!r}: {loss_agg_mode} divides by it; set a number over 0"
        )
    for name, count in (("num_loss_tokens", num_loss_tokens), ("num_sequences", num_sequences)):
        if count < 1:
            raise ValueError(f"{name}={count}: the mini-batch has no token to learn from, all its masks are empty")


def loss_weights(
    response_mask_T: Tensor,
    cu_seqlens: Tensor,
    loss_agg_mode: str,
    num_loss_tokens: int,
    num_sequences: int,
    loss_scale_factor: float | None = None,
    counts_T: Tensor | None = None,
) -> Tensor:
    """[T] float32 loss weight of each token; 0 where the mask is 0 and past cu_seqlens[-1] (alignment padding).

    response_mask_T: [T] bool or 0/1.  cu_seqlens: [S + 1] integers.  Both of one micro-batch of whole sequences.
    num_loss_tokens, num_sequences: loss tokens, and sequences with at least one, of the mini-batch over all ranks.
    token-mean: 1 / num_loss_tokens.  token-sum: 1.  seq-mean-token-sum: 1 / num_sequences.
    seq-mean-token-mean: 1 / (loss tokens of the sequence * num_sequences).  counts_T: [T] loss tokens of the sequence,
    where a sequence of the counts is an episode with more rows than this one; None: those of the row.
    seq-mean-token-sum-norm: 1 / (loss_scale_factor * num_sequences); the other modes ignore loss_scale_factor.
    Raises ValueError for another mode, a count below 1 and a needed loss_scale_factor that is missing or not over 0.
    """
    check_loss_counts(loss_agg_mode, num_loss_tokens, num_sequences, loss_scale_factor)
    divisor = {"token-mean": num_loss_tokens, "token-sum": 1}.get(loss_agg_mode, num_sequences)
    sequence_T = sequence_of_token(cu_seqlens, len(response_mask_T))
    num_local = len(cu_seqlens) - 1
    mask_T = (response_mask_T != 0) & (sequence_T < num_local)
    divisor_T = torch.full(mask_T.shape, float(divisor), dtype=torch.float64, device=mask_T.device)
    if loss_agg_mode == "seq-mean-token-mean" and counts_T is not None:
        divisor_T = divisor_T * counts_T.double().clamp(min=1.0)
    elif loss_agg_mode == "seq-mean-token-mean":
        counts_S = torch.zeros(num_local + 1, dtype=torch.float64, device=mask_T.device)
        counts_S.index_add_(0, sequence_T, mask_T.double())
        divisor_T = divisor_T * counts_S.clamp(min=1.0)[sequence_T]
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        assert loss_scale_factor is not None
        divisor_T = divisor_T * loss_scale_factor
    return torch.where(mask_T, 1.0 / divisor_T, 0.0).float()


def weighted_sum(values_T: Tensor, weights_T: Tensor) -> Tensor:
    """Scalar sum_t weights_t * values_t; a token of weight 0 counts as 0 even where its value is NaN or infinite."""
    return (torch.where(weights_T != 0, values_T, 0.0) * weights_T).sum()


def aggregated(
    values_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, loss_agg_mode: str, loss_scale_factor: float | None = None
) -> Metric:
    """Aggregates one rank's values as a loss would be; `merge_metrics` over ranks gives the value of the whole batch.

    Arguments as `loss_weights`. Values of masked tokens are ignored. Without a token: a mean of weight 0, or a sum 0.
    """
    starts, mask = cu_seqlens.tolist(), mask_T != 0
    num_loss_tokens = int(mask[: starts[-1]].sum())
    num_sequences = sum(bool(mask[start:end].any()) for start, end in pairwise(starts))
    if not num_loss_tokens:
        return Metric(0.0, "sum") if loss_agg_mode == "token-sum" else Metric(0.0, "mean", 0.0)
    weights_T = loss_weights(mask, cu_seqlens, loss_agg_mode, num_loss_tokens, num_sequences, loss_scale_factor)
    value = float(weighted_sum(values_T.detach().double(), weights_T))
    if loss_agg_mode == "token-sum":
        return Metric(value, "sum")
    return Metric(value, "mean", float(num_loss_tokens if loss_agg_mode == "token-mean" else num_sequences))


def sequence_of_token(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[T] int64 index of each token's sequence; S for tokens past cu_seqlens[-1]."""
    positions_T = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions_T, right=True)
