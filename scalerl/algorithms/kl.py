"""Per-token estimators of KL(policy || reference), and KL(teacher || policy) over a teacher's likeliest words.

Dims: T packed tokens, K words of a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

K3_LOG_RATIO_BOUND = 20.0
K3_BOUND = 10.0
# Least probability that a policy gives all words but a teacher's: the precision of a sum of float32 probabilities.
REST_BOUND = 2.0**-23


def _k1(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    return logprobs_T - ref_logprobs_T


def _abs(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    return (logprobs_T - ref_logprobs_T).abs()


def _k2(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    return 0.5 * (logprobs_T - ref_logprobs_T).square()


def _k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    delta_T = (ref_logprobs_T - logprobs_T).clamp(-K3_LOG_RATIO_BOUND, K3_LOG_RATIO_BOUND)
    # expm1 keeps the digits that exp(d) - 1 - d loses for small d.
    return (torch.expm1(delta_T) - delta_T).clamp(-K3_BOUND, K3_BOUND)


_KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": _k1,
    "kl": _k1,
    "abs": _abs,
    "k2": _k2,
    "mse": _k2,
    "k3": _k3,
    "low_var_kl": _k3,
}
# A kind with a + appended has the same value and another gradient.
KL_KINDS = (*_KINDS, *(f"{kind}+" for kind in _KINDS))


def kl_penalty(logprobs_T: Tensor, ref_logprobs_T: Tensor, kind: str) -> Tensor:
    """[T] KL estimate of `kl_penalty_forward`; a kind that ends in + has the gradient of k2, logprobs - ref_logprobs.

    On-policy, the expected gradient of k2 is that of the KL; that of k1 is 0, that of k3 is that of the reversed KL.
    Raises ValueError as `kl_penalty_forward`.  Source: arXiv 2510.01555.
    """
    value_T = kl_penalty_forward(logprobs_T, ref_logprobs_T, kind)
    if not kind.endswith("+"):
        return value_T
    slope_T = (logprobs_T - ref_logprobs_T).detach()
    return value_T.detach() + slope_T * (logprobs_T - logprobs_T.detach())


def kl_penalty_forward(logprobs_T: Tensor, ref_logprobs_T: Tensor, kind: str) -> Tensor:
    """[T] KL estimate of each token, with a gradient to logprobs_T.  d = ref_logprobs - logprobs.

    k1 | kl: -d (unbiased, either sign).  abs: |d|.  k2 | mse: d^2 / 2.
    k3 | low_var_kl: exp(d) - 1 - d with d in [-20, 20], result at most 10 (no gradient beyond a bound).
    A + at the end of a kind changes no value.
    Raises ValueError for another kind.  Source: J. Schulman, http://joschu.net/blog/kl-approx.html
    """
    if kind not in KL_KINDS:
        raise ValueError(f"kl_loss_type={kind!r}: no such KL estimator; known are {sorted(KL_KINDS)}")
    return _KINDS[kind.removesuffix("+")](logprobs_T, ref_logprobs_T)


def top_k_kl(logprobs_TK: Tensor, teacher_logprobs_TK: Tensor) -> Tensor:
    """[T] KL(teacher || policy) over K + 1 outcomes, with a gradient to logprobs_TK: K words, and any other word.

    Both: log-probs of the K words that the teacher finds likeliest; a word whose probability is 0 there is one of the
    others. Never negative, at most the KL over all words, and that KL where K is the vocabulary.
    Source: arXiv 2601.20802 (top-K distillation with a tail), TRL's loss_add_tail.
    """
    # 1 - sum loses the digits of a small rest.
    teacher_TK, policy_TK = teacher_logprobs_TK.double(), logprobs_TK.double()
    probs_TK = teacher_TK.exp()
    is_word_TK = probs_TK > 0
    of_words_T = torch.where(is_word_TK, probs_TK * (teacher_TK - policy_TK), 0.0).sum(-1)
    # Log-probs are float32: a rest below its precision is none.
    teacher_rest_T = 1.0 - probs_TK.sum(-1)
    policy_rest_T = 1.0 - torch.where(is_word_TK, policy_TK.exp(), 0.0).sum(-1)
    teacher_rest_T, policy_rest_T = teacher_rest_T.clamp(min=0.0), policy_rest_T.clamp(min=REST_BOUND)
    of_rest_T = torch.xlogy(teacher_rest_T, teacher_rest_T) - teacher_rest_T * policy_rest_T.log()
    return (of_words_T + of_rest_T).to(logprobs_TK.dtype)
