"""Registry of advantage estimators, and the estimators that need one score per sample (outcome rewards).

The estimators that give each token its own advantage are in `token_advantages`.
Dims: S samples, G groups (samples of one prompt, known by their uid, in any order), T packed tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalerl.algorithms.masked import WHITEN_EPS
from scalerl.algorithms.registry import Registry, check_result
from scalerl.base.user_code import UserCodeError, called, on_forget, place_of
from scalerl.config.names import CRITIC_ESTIMATORS, ESTIMATORS, REFERENCE_ESTIMATORS
from scalerl.config.schema import AlgorithmConfig

_REGISTRY: Registry[Callable[..., Any]] = Registry(ESTIMATORS)
adv_estimator_names = _REGISTRY.names

# Token column that a critic computes: a run has a critic if its estimator needs this column.
VALUES = "values"
# That of the reference model, likewise.
REF_LOGPROBS = "ref_logprobs"
# What an estimator of tokens may need: [T] int64, the position of a token's turn in its episode; -1 where the policy
# sampled nothing.
TURN_INDEX = "turn_index"
GRPO_EPS = 1e-6


@dataclass(frozen=True)
class AdvantageEstimator:
    """A registered advantage estimator: its function, and what a caller has to know to call it.

    per_token False: function(scores_S, uids_S, config, **columns) -> advantages [S], the same for all sampled tokens
    of a sample.  True: function(rewards_T, response_mask_T, cu_seqlens, config, **columns) -> (advantages [T], returns
    [T]), on each data-parallel rank for its samples.
    needs: batch columns that are passed by name: sample columns [S]; with per_token also the critic's `values` [T], and
    TURN_INDEX [T].
    whiten: token advantages are whitened over the whole step afterwards.
    """

    function: Callable[..., Any]
    per_token: bool
    needs: tuple[str, ...] = ()
    whiten: bool = False

    def __call__(self, *args: Any, **columns: Any) -> Any:
        """Calls the function and checks its result.

        Raises UserCodeError if a user's function raises, or if the result has another type or shape than documented.
        """
        key = "algorithm.adv_estimator"
        result = called(self.function, key, *args, **columns)
        parts = result if self.per_token and isinstance(result, tuple) else (result,)
        for name, part in zip(("advantages", "returns") if self.per_token else ("advantages",), parts, strict=False):
            check_result(self.function, f"{key}, {name}", part, args[0])
        if self.per_token and len(parts) != 2:
            raise UserCodeError(f"{key}: {place_of(self.function)} must return two tensors, advantages and returns")
        return result


def register_adv_est(name: str, *, needs: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Decorator of fn(scores_S, uids_S, config, **columns) -> advantages_S; see `AdvantageEstimator`.

    Raises ValueError if `needs` has "values", which is a token column.
    """
    if VALUES in needs:
        raise ValueError(
            f"register_adv_est({name!r}): needs={needs}: an estimator of samples gets no {VALUES} of tokens; register "
            "it with register_token_adv_est"
        )
    return _register(name, arguments=("scores_S", "uids_S", "config"), needs=needs, per_token=False)


def register_token_adv_est(
    name: str, *, needs: tuple[str, ...] = (), whiten: bool = False
) -> Callable[[Callable], Callable]:
    """Decorator of fn(rewards_T, response_mask_T, cu_seqlens, config, **columns) -> (advantages_T, returns_T)."""
    arguments = ("rewards_T", "response_mask_T", "cu_seqlens", "config")
    return _register(name, arguments=arguments, needs=needs, per_token=True, whiten=whiten)


def _register(name: str, *, needs: tuple[str, ...], **traits: Any) -> Callable[[Callable], Callable]:
    add = _REGISTRY.register(name, needs=needs, **traits)

    def added(function: Callable) -> Callable:
        estimator = add(function)
        for column, estimators in ((VALUES, CRITIC_ESTIMATORS), (REF_LOGPROBS, REFERENCE_ESTIMATORS)):
            if column in needs and name not in estimators:
                estimators.add(name)
                on_forget(function, functools.partial(estimators.discard, name))
        return estimator

    return added


def get_adv_estimator(name: str) -> AdvantageEstimator:
    """The estimator registered as `name`.  Raises ValueError naming the known estimators."""
    return AdvantageEstimator(_REGISTRY.get(name), **_REGISTRY.traits(name))


@register_adv_est("grpo")
def grpo(scores_S: Tensor, uids_S: np.ndarray, config: AlgorithmConfig) -> Tensor:
    """GRPO: A = (s - mean_g) / (std_g + 1e-6), std unbiased.

    Without `norm_adv_by_std_in_grpo`: A = s - mean_g (Dr.GRPO).
    scores_S: [S] float, one score per sample.  uids_S: [S], equal for the samples of one prompt, in any order.
    A group of one has no statistics: mean 0 and std 1 are taken, so A = s / (1 + 1e-6), or s for Dr.GRPO.
    Returns [S] float32; exactly 0 where all scores of a group of two or more are equal.
    Raises ValueError for a score that is not finite.
    Source: DeepSeekMath (arXiv 2402.03300) section 4.1.2; Dr.GRPO (arXiv 2503.20783) section 3.2.
    """
    groups = _Groups(scores_S, uids_S)
    centred_S = groups.centred()
    return (centred_S / _divisor(groups, centred_S, config)).float()


@register_adv_est("grpo_passk")
def grpo_passk(scores_S: Tensor, uids_S: np.ndarray, config: AlgorithmConfig) -> Tensor:
    """Pass@k training: A = (best - second best) / (std_g + 1e-6) for the best sample of a group, 0 for the others.

    Without `norm_adv_by_std_in_grpo` nothing is divided. Equal best scores: 0 for all. A group of one: as `grpo`.
    Shapes and errors as `grpo`.  Source: arXiv 2503.19595 section 3 (pass@k as the best of k, leave-one-out baseline).
    """
    groups = _Groups(scores_S, uids_S)
    best_G = groups.extreme(groups.scores_S, "amax")
    is_best_S = groups.scores_S == best_G[groups.number_S]
    # The first of several best samples; the other samples then hold the second best score.
    rows_S = torch.arange(len(is_best_S))
    first_G = groups.extreme(torch.where(is_best_S, rows_S, len(rows_S)).double(), "amin")
    winner_S = rows_S == first_G[groups.number_S]
    second_G = groups.extreme(groups.scores_S.masked_fill(winner_S, -torch.inf), "amax")
    second_G = torch.where(groups.counts_G > 1, second_G, 0.0)
    gap_S = (best_G - second_G)[groups.number_S]
    return (torch.where(winner_S, gap_S, 0.0) / _divisor(groups, groups.centred(), config)).float()


@register_adv_est("rloo")
def rloo(scores_S: Tensor, uids_S: np.ndarray, config: AlgorithmConfig) -> Tensor:
    """RLOO: A = s - mean of the other scores of the group = (s - mean_g) * n / (n - 1).  A group of one: A = s.

    Shapes and errors as `grpo`.  Source: RLOO (arXiv 2402.14740) section 2.2.
    """
    groups = _Groups(scores_S, uids_S)
    counts_S = groups.counts_S.double()
    return (groups.centred() * torch.where(counts_S > 1, counts_S / (counts_S - 1).clamp(min=1), 1.0)).float()


@register_adv_est("opo", needs=("num_sampled_tokens",))
def opo(scores_S: Tensor, uids_S: np.ndarray, config: AlgorithmConfig, *, num_sampled_tokens: np.ndarray) -> Tensor:
    """OPO: A = s - sum_g(l * s) / sum_g(l), the baseline of least variance if gradients grow with the tokens.

    num_sampled_tokens: [S] l.  A group of one: A = s.  A group without tokens: its plain mean.
    Shapes and errors as `grpo`.  Source: OPO (arXiv 2505.23585) section 3.
    """
    groups = _Groups(scores_S, uids_S)
    return groups.centred(torch.tensor(num_sampled_tokens, dtype=torch.float64)).float()


@register_adv_est("gpg")
def gpg(scores_S: Tensor, uids_S: np.ndarray, config: AlgorithmConfig) -> Tensor:
    """GPG: A = alpha * (s - mean_g), alpha = S / (samples of groups whose scores differ).

    Groups of equal scores give no gradient: alpha makes up for their share of the batch. A group of one counts as
    a group with a gradient, and A = alpha * s.  alpha = 1 where no group has a gradient.
    Shapes and errors as `grpo`.  Source: GPG (arXiv 2504.02546) section 3.2, with the paper's F_norm = 1.
    """
    groups = _Groups(scores_S, uids_S)
    centred_S = groups.centred()
    differs_G = groups.extreme(centred_S.abs(), "amax") > 0
    num_learning = int((differs_G | (groups.counts_G == 1))[groups.number_S].sum())
    return (centred_S * (len(centred_S) / max(num_learning, 1) if num_learning else 1.0)).float()


@register_adv_est("reinforce_plus_plus_baseline", needs=("num_sampled_tokens",))
def reinforce_plus_plus_baseline(
    scores_S: Tensor, uids_S: np.ndarray, config: AlgorithmConfig, *, num_sampled_tokens: np.ndarray
) -> Tensor:
    """REINFORCE++ with baseline: A = (b - mean) / sqrt(var + 1e-8), b = s - mean_g.

    Mean and unbiased variance are over the step's sampled tokens: a sample counts as often as it has tokens.
    num_sampled_tokens: [S].  A group of one: b = s.
    Shapes and errors as `grpo`.  Source: REINFORCE++ (arXiv 2501.03262) section 3.3.
    """
    centred_S = _Groups(scores_S, uids_S).centred()
    return whiten_by_tokens(centred_S, torch.tensor(num_sampled_tokens, dtype=torch.float64)).float()


def whiten_by_tokens(values_S: Tensor, num_tokens_S: Tensor) -> Tensor:
    """Whitens values of samples, [S], as `whiten_selected` would if each of a sample's tokens had its value.

    Fewer than two tokens in all have variance 0.
    """
    total = num_tokens_S.sum()
    mean = (values_S * num_tokens_S).sum() / total.clamp(min=1)
    squares = ((values_S - mean).square() * num_tokens_S).sum()
    variance = torch.where(total > 1, squares / (total - 1).clamp(min=1), 0.0)
    return (values_S - mean) * torch.rsqrt(variance + WHITEN_EPS)


def _divisor(groups: _Groups, centred_S: Tensor, config: AlgorithmConfig) -> Tensor:
    """[S] what GRPO divides by: std_g + 1e-6, or 1 without `norm_adv_by_std_in_grpo`."""
    if not config.norm_adv_by_std_in_grpo:
        return torch.ones_like(centred_S)
    std_S = (groups.sums(centred_S.square()) / (groups.counts_G - 1).clamp(min=1)).sqrt()[groups.number_S]
    return torch.where(groups.counts_S > 1, std_S, 1.0) + GRPO_EPS


class _Groups:
    """Scores of samples and the groups they belong to.

    scores_S: [S] float64.  number_S: [S] group of each sample.  counts_G, counts_S: samples in the group.
    """

    def __init__(self, scores_S: Tensor, uids_S: np.ndarray) -> None:
        uids_S = np.asarray(uids_S)
        if scores_S.ndim != 1 or uids_S.shape != tuple(scores_S.shape):
            raise ValueError(f"scores {tuple(scores_S.shape)} and uids {uids_S.shape} must both be [number of samples]")
        self.scores_S = scores_S.detach().cpu().double()
        bad = torch.nonzero(~self.scores_S.isfinite())
        if len(bad):
            row = int(bad[0])
            raise ValueError(
                f"score of sample {row} (uid {uids_S[row]}) is {self.scores_S[row].item()} ({len(bad)} of "
                f"{len(self.scores_S)} scores are not finite): the reward function must return a finite number"
            )
        self.number_S = torch.from_numpy(np.unique(uids_S, return_inverse=True)[1].reshape(-1).astype(np.int64))
        self.counts_G = torch.bincount(self.number_S)
        self.counts_S = self.counts_G[self.number_S]

    def sums(self, values_S: Tensor) -> Tensor:
        """[G] sum of the values of each group's samples."""
        return torch.zeros(len(self.counts_G), dtype=torch.float64).index_add_(0, self.number_S, values_S)

    def extreme(self, values_S: Tensor, reduce: str) -> Tensor:
        """[G] smallest (reduce="amin") or largest (reduce="amax") value of each group's samples."""
        extremes_G = torch.zeros(len(self.counts_G), dtype=torch.float64)
        return extremes_G.scatter_reduce_(0, self.number_S, values_S, reduce=reduce, include_self=False)

    def centred(self, weights_S: Tensor | None = None) -> Tensor:
        """[S] scores less their group's mean, weighted if weights are given; the score of a group of one is kept."""
        # The group's lowest score is taken off first, so that equal scores give a mean without rounding.
        shifted_S = self.scores_S - self.extreme(self.scores_S, "amin")[self.number_S]
        means_G = self.sums(shifted_S) / self.counts_G
        if weights_S is not None:
            totals_G = self.sums(weights_S)
            weighted_G = self.sums(shifted_S * weights_S) / torch.where(totals_G > 0, totals_G, 1.0)
            means_G = torch.where(totals_G > 0, weighted_G, means_G)
        return torch.where(self.counts_S > 1, shifted_S - means_G[self.number_S], self.scores_S)
