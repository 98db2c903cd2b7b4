"""Policy losses other than PPO's (`losses.vanilla`). Dims: T packed tokens.

Each takes logprobs_T, old_logprobs_T, advantages_T [T] and an ActorConfig, and returns ([T] loss, {name: [T] values
without gradient}). sg: without gradient. D = logprobs - old_logprobs in [-20, 20], r = exp(D). low, high:
`losses.clip_bounds`. actor/ppo_kl is -D in each; actor/pg_clipfrac is 1 where a clip changes a token's loss, and absent
from losses without a clip.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scalerl.algorithms.losses import SELECTED, SEQUENCES, LossSequences, bounded_log_ratio, clip_bounds
from scalerl.algorithms.losses import register_policy_loss as register
from scalerl.config.schema import ActorConfig

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


@register("gspo", needs=(SEQUENCES,))
def gspo(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, config: ActorConfig, *, sequences: LossSequences
) -> LossAndMetrics:
    """GSPO, PPO's clip of one ratio per sequence: s = exp(mean_t D), s_t = sg(s) exp(logprobs_t - sg(logprobs_t)).

    l = max(-A s_t, -A clip(s_t, 1 - low, 1 + high)). The mean is over the sequence's loss tokens. The paper aggregates
    by seq-mean-token-mean and clips at 3e-4 and 4e-4.
    Source: GSPO (arXiv 2507.18071) eqs. 5 to 7, and eq. 13 for advantages of single tokens.
    """
    low, high = clip_bounds(config)
    log_ratio_T = bounded_log_ratio(logprobs_T, old_logprobs_T)
    mean_T = sequences.mean(log_ratio_T.detach()).to(logprobs_T.dtype)
    # Through logprobs themselves: a bounded token still moves with its sequence.
    ratio_T = (mean_T + logprobs_T - logprobs_T.detach()).exp()
    plain_T, clipped_T = -advantages_T * ratio_T, -advantages_T * ratio_T.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(plain_T, clipped_T), _metrics(log_ratio_T, clipped_T > plain_T)


@register("geo_mean", needs=(SEQUENCES,))
def geo_mean(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, config: ActorConfig, *, sequences: LossSequences
) -> LossAndMetrics:
    """GMPO, the geometric mean of ratios: l_t = -A_t exp(mean_t d).

    d = sign(A) min(sign(A) D, sign(A) clip(D, -low, high)).
    Bounds are of log-ratios here (the paper: 0.4 both). The mean is over the sequence's loss tokens, and all of them
    have a gradient through it. The paper aggregates by seq-mean-token-mean.
    Source: GMPO (arXiv 2507.20673) eqs. 3 and 4.
    """
    low, high = clip_bounds(config)
    log_ratio_T = bounded_log_ratio(logprobs_T, old_logprobs_T)
    sign_T = advantages_T.sign()
    plain_T, clipped_T = sign_T * log_ratio_T, sign_T * log_ratio_T.clamp(-low, high)
    ratio_T = sequences.mean(sign_T * torch.minimum(plain_T, clipped_T)).exp().to(logprobs_T.dtype)
    return -advantages_T * ratio_T, _metrics(log_ratio_T, clipped_T < plain_T)


@register("cispo")
def cispo(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, config: ActorConfig) -> LossAndMetrics:
    """CISPO: l = -sg(clip(r, 1 - low, 1 + high)) A logprobs; clipped tokens keep their gradient, with a bounded weight.

    Source: MiniMax-M1 (arXiv 2506.13585) eqs. 4 and 5; the paper sets the upper bound alone (a clip_ratio_low near 1).
    """
    low, high = clip_bounds(config)
    log_ratio_T = bounded_log_ratio(logprobs_T, old_logprobs_T)
    ratio_T = log_ratio_T.detach().exp()
    weight_T = ratio_T.clamp(1.0 - low, 1.0 + high)
    return -weight_T * advantages_T * logprobs_T, _metrics(log_ratio_T, weight_T != ratio_T)


@register("sapo")
def sapo(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, config: ActorConfig) -> LossAndMetrics:
    """SAPO, a gate in place of a clip: l = -A sigmoid(tau (r - 1)) 4 / tau.

    tau = actor.tau_pos where A > 0, else actor.tau_neg.
    At r = 1 the gradient is that of -A r. The paper aggregates by seq-mean-token-mean.
    Source: SAPO (arXiv 2511.20347) eqs. 5 to 7.
    """
    log_ratio_T = bounded_log_ratio(logprobs_T, old_logprobs_T)
    tau_T = torch.where(advantages_T > 0, config.tau_pos, config.tau_neg)
    gate_T = torch.sigmoid(tau_T * torch.expm1(log_ratio_T)) * 4.0 / tau_T
    return -advantages_T * gate_T, _metrics(log_ratio_T)


@register("gpg")
def gpg(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, config: ActorConfig) -> LossAndMetrics:
    """GPG: l = -A logprobs, the plain policy gradient, without a ratio.  Source: GPG (arXiv 2504.02546) eq. 5."""
    return -advantages_T * logprobs_T, _metrics(bounded_log_ratio(logprobs_T, old_logprobs_T))


@register("dro")
def dro(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, config: ActorConfig) -> LossAndMetrics:
    """DRO, a square in place of a clip: l = -A logprobs + policy_loss.dro_beta / 2 (logprobs - old_logprobs)^2.

    The log-ratio is not bounded, so that a token is pulled back however far it has moved.
    Raises ValueError when dro_beta is not over 0.
    Source: DRO (arXiv 2405.19107), with advantages in place of reward - value.
    """
    beta = config.policy_loss.dro_beta
    if beta is None or not beta > 0:
        raise ValueError(f"actor.policy_loss.dro_beta={beta}: loss_mode=dro needs a number over 0")
    square_T = (logprobs_T - old_logprobs_T).square()
    return -advantages_T * logprobs_T + 0.5 * beta * square_T, _metrics(bounded_log_ratio(logprobs_T, old_logprobs_T))


@register("clip_cov", needs=(SELECTED,))
def clip_cov(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, config: ActorConfig, *, selected: Tensor
) -> LossAndMetrics:
    """Clip-Cov, PPO's loss without the selected tokens: l = max(-A r, -A clip(r, 1 - low, 1 + high)).

    l = 0 for the selected tokens.
    selected: `covariance.select_tokens`, some of the tokens whose covariance is in (clip_cov_lb, clip_cov_ub).
    actor/cov_selected_frac: 1 for those; actor/pg_clipfrac does not count them.
    Source: arXiv 2505.22617 section 4.2 (Clip-Cov).
    """
    low, high = clip_bounds(config)
    log_ratio_T = bounded_log_ratio(logprobs_T, old_logprobs_T)
    ratio_T = log_ratio_T.exp()
    plain_T, clipped_T = -advantages_T * ratio_T, -advantages_T * ratio_T.clamp(1.0 - low, 1.0 + high)
    loss_T = torch.where(selected, 0.0, torch.maximum(plain_T, clipped_T))
    metrics = _metrics(log_ratio_T, clipped_T > plain_T)
    return loss_T, metrics | {"actor/cov_selected_frac": selected.to(loss_T.dtype)}


@register("kl_cov", needs=(SELECTED,))
def kl_cov(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, config: ActorConfig, *, selected: Tensor
) -> LossAndMetrics:
    """KL-Cov, policy gradient with a KL penalty on the selected tokens: l = -A r, plus ppo_kl_coef |D| for those.

    selected: `covariance.select_tokens`, the tokens of greatest covariance.
    Source: arXiv 2505.22617 section 4.2 (KL-Cov).
    """
    log_ratio_T = bounded_log_ratio(logprobs_T, old_logprobs_T)
    penalty_T = config.policy_loss.ppo_kl_coef * log_ratio_T.abs()
    loss_T = -advantages_T * log_ratio_T.exp() + torch.where(selected, penalty_T, 0.0)
    return loss_T, _metrics(log_ratio_T) | {"actor/cov_selected_frac": selected.to(loss_T.dtype)}


def _metrics(log_ratio_T: Tensor, clipped_T: Tensor | None = None) -> dict[str, Tensor]:
    metrics = {"actor/ppo_kl": -log_ratio_T.detach()}
    if clipped_T is not None:
        metrics["actor/pg_clipfrac"] = clipped_T.detach().to(log_ratio_T.dtype)
    return metrics
