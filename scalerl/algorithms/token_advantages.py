"""Advantage estimators that give each token its own advantage, on the data-parallel rank that holds the samples.

Each takes rewards_T, response_mask_T [T] and cu_seqlens [sequences + 1], and returns (advantages [T], returns [T])
float32, 0 at tokens outside the mask. A token that the policy did not sample (observation, tool output) has no
advantage and no reward, and neither discounts nor ends the rewards after it. They raise ValueError as `gae.gae` does.
Dims: T packed tokens, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scalerl.algorithms.advantages import register_token_adv_est
from scalerl.algorithms.gae import gae
from scalerl.config.names import DISTILLATION
from scalerl.config.schema import AlgorithmConfig


@register_token_adv_est("gae", needs=("values",), whiten=True)
def gae_of_critic(
    rewards_T: Tensor, response_mask_T: Tensor, cu_seqlens: Tensor, config: AlgorithmConfig, *, values: Tensor
) -> tuple[Tensor, Tensor]:
    """GAE (`gae.gae`) with algorithm.gamma and algorithm.lam.  values: [T], the critic's."""
    return gae(rewards_T, values, response_mask_T, cu_seqlens, gamma=config.gamma, lam=config.lam)


@register_token_adv_est("reinforce_plus_plus", whiten=True)
def reinforce_plus_plus(
    rewards_T: Tensor, response_mask_T: Tensor, cu_seqlens: Tensor, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """REINFORCE++: A_t = R_t = r_t + gamma R_t', whitened over the step afterwards.

    t': the sequence's next sampled token.  gamma: algorithm.gamma.  Source: REINFORCE++ (arXiv 2501.03262) section 3.1.
    """
    returns_T = _returns(rewards_T, response_mask_T, cu_seqlens, config.gamma)
    return returns_T, returns_T


@register_token_adv_est("remax", needs=("baseline_score",))
def remax(
    rewards_T: Tensor, response_mask_T: Tensor, cu_seqlens: Tensor, config: AlgorithmConfig, *, baseline_score: Tensor
) -> tuple[Tensor, Tensor]:
    """ReMax: A_t = R_t - b, R_t the sum of rewards from t on, b the score of the greedy response to the same prompt.

    baseline_score: [S] b.  Raises ValueError for a score that is not finite.
    Source: ReMax (arXiv 2310.10505) section 4.1.
    """
    bad = torch.nonzero(~baseline_score.isfinite())
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"score of the greedy response to sequence {row}'s prompt is {baseline_score[row].item()}: the reward "
            "function must return finite numbers"
        )
    returns_T = _returns(rewards_T, response_mask_T, cu_seqlens, 1.0)
    baselines_T = baseline_score.to(returns_T.dtype).repeat_interleave(cu_seqlens.diff())
    return torch.where(response_mask_T != 0, returns_T - baselines_T, 0.0), returns_T


@register_token_adv_est(DISTILLATION, needs=("old_logprobs", "ref_logprobs"))
def on_policy_distillation(
    rewards_T: Tensor,
    response_mask_T: Tensor,
    cu_seqlens: Tensor,
    config: AlgorithmConfig,
    *,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
) -> tuple[Tensor, Tensor]:
    """On-policy distillation: A_t = ref_logprobs - old_logprobs, minus the reverse KL of the token.

    The reference model is the teacher. rewards_T: not used; scores are logged and validated all the same.
    Source: MiniLLM (arXiv 2306.08543), GKD (arXiv 2306.13649) with the reverse KL on the student's own samples.
    """
    advantages_T = torch.where(response_mask_T != 0, ref_logprobs - old_logprobs, 0.0).float()
    return advantages_T, advantages_T


def _returns(rewards_T: Tensor, response_mask_T: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """[T] discounted sums of the rewards of each sampled token and those after it."""
    values_T = torch.zeros_like(rewards_T)
    return gae(rewards_T, values_T, response_mask_T, cu_seqlens, gamma=gamma, lam=1.0)[0]
