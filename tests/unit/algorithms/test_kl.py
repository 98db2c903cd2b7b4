"""KL estimators against scalar formulas and against the KL they estimate."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.algorithms.kl import KL_KINDS, kl_penalty, kl_penalty_forward, top_k_kl

FORMULAS = {
    "k1": lambda d: -d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: min(math.expm1(min(max(d, -20.0), 20.0)) - min(max(d, -20.0), 20.0), 10.0),
}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def test_every_kind_has_a_formula_here():
    plain = {*FORMULAS, *ALIASES}
    assert set(KL_KINDS) == plain | {f"{kind}+" for kind in plain}


@pytest.mark.parametrize("kind", KL_KINDS)
@given(logprob=st.floats(-50, 0), ref_logprob=st.floats(-50, 0))
def test_equals_the_formula(kind, logprob, ref_logprob):
    got = kl_penalty_forward(
        torch.tensor([logprob], dtype=torch.float64), torch.tensor([ref_logprob], dtype=torch.float64), kind
    )
    plain = kind.removesuffix("+")
    want = FORMULAS[ALIASES.get(plain, plain)](ref_logprob - logprob)
    assert got.item() == pytest.approx(want, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("kind", KL_KINDS)
@settings(max_examples=25)
@given(logprob=st.floats(-1e4, 0), ref_logprob=st.floats(-1e4, 0))
def test_straight_through_has_the_value_of_its_kind_and_the_gradient_of_k2(kind, logprob, ref_logprob):
    logprobs = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([ref_logprob], dtype=torch.float64)
    got = kl_penalty(logprobs, reference, kind)
    got.sum().backward()
    assert torch.equal(got.detach(), kl_penalty_forward(logprobs.detach(), reference, kind))
    if kind.endswith("+"):
        assert logprobs.grad.item() == logprob - ref_logprob


@pytest.mark.parametrize("kind", [kind for kind in KL_KINDS if kind.endswith("+")])
def test_expected_gradient_of_straight_through_is_that_of_the_kl(kind):
    """Over all words of a vocabulary, which is what sampling estimates."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    (want,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    sampled = policy.detach().exp() * kl_penalty(policy, reference, kind)
    (got,) = torch.autograd.grad(sampled.sum(), logits)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_mean_over_the_policy_is_the_kl(kind):
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    reference = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    want = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * kl_penalty_forward(policy, reference, kind)).sum(), want)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_gradient_equals_finite_differences(kind):
    logprobs = torch.tensor([-1.0, -3.0, -0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.0, -1.0, -0.1], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_penalty_forward(x, reference, kind), (logprobs,))


@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_low_variance_kl_is_finite_for_any_gap(kind, gap):
    logprobs = torch.tensor([gap], requires_grad=True)
    kl_T = kl_penalty_forward(logprobs, torch.zeros(1), kind)
    kl_T.sum().backward()
    assert kl_T.item() == 10.0
    assert logprobs.grad.item() == 0.0


def test_k3_keeps_small_differences_in_float32():
    got = kl_penalty_forward(torch.tensor([-1e-4]), torch.tensor([0.0]), "k3").item()
    assert got == pytest.approx(math.expm1(1e-4) - 1e-4, rel=1e-2)


def test_unknown_kind_lists_the_known():
    with pytest.raises(ValueError, match=r"kl_loss_type='k4'.*low_var_kl"):
        kl_penalty_forward(torch.zeros(1), torch.zeros(1), "k4")


# --- a teacher's likeliest words ---


def two_models(seed: int, num_tokens: int, num_words: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all words by a policy and by a teacher: [tokens, words] float64."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        (scale * torch.randn(num_tokens, num_words, generator=generator, dtype=torch.float64)).log_softmax(-1)
        for _ in range(2)
    )


def of_top(policy_TV: torch.Tensor, teacher_TV: torch.Tensor, top_k: int) -> torch.Tensor:
    teacher_TK, ids_TK = teacher_TV.topk(top_k, -1)
    return top_k_kl(policy_TV.gather(1, ids_TK).float(), teacher_TK.float())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 30), st.data(), st.sampled_from([0.1, 1.0, 4.0]))
def test_top_k_kl_is_that_of_the_words_and_one_more_outcome(
    seed: int, num_words: int, data: st.DataObject, scale: float
) -> None:
    top_k = data.draw(st.integers(1, num_words))
    policy_TV, teacher_TV = two_models(seed, 3, num_words, scale)
    mine = of_top(policy_TV, teacher_TV, top_k)
    for token in range(3):
        words = sorted(range(num_words), key=lambda word: -float(teacher_TV[token, word]))
        outcomes = [[word] for word in words[:top_k]] + ([words[top_k:]] if top_k < num_words else [])
        expected = 0.0
        for outcome in outcomes:
            p, q = (
                math.fsum(math.exp(float(model[token, word])) for word in outcome) for model in (teacher_TV, policy_TV)
            )
            expected += p * math.log(p / q)
        assert float(mine[token]) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_top_k_kl_grows_with_k_up_to_the_kl_of_all_words() -> None:
    policy_TV, teacher_TV = two_models(0, 50, 20, 2.0)
    by_k = torch.stack([of_top(policy_TV, teacher_TV, top_k) for top_k in range(1, 21)])
    assert (by_k[0] >= -1e-6).all() and (by_k.diff(dim=0) > -1e-5).all() and (by_k[4] < by_k[-1] - 1e-3).any()
    exact = (teacher_TV.exp() * (teacher_TV - policy_TV)).sum(-1)
    torch.testing.assert_close(by_k[-1].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_k", [3, 20])
def test_gradient_of_top_k_kl(top_k: int) -> None:
    """On logits it is the policy's probability less the teacher's; other words share what the teacher leaves them."""
    generator = torch.Generator().manual_seed(4)
    logits_TV = torch.randn(7, 20, generator=generator).requires_grad_()
    teacher_TV = (2 * torch.randn(7, 20, generator=generator)).log_softmax(-1)
    of_top(logits_TV.log_softmax(-1), teacher_TV, top_k).sum().backward()
    policy_TV, expected_TV = logits_TV.detach().softmax(-1), teacher_TV.exp()
    is_top_TV = torch.zeros(7, 20, dtype=torch.bool).scatter(1, teacher_TV.topk(top_k, -1).indices, True)
    rest_T = expected_TV.masked_fill(is_top_TV, 0.0).sum(-1, keepdim=True)
    share_TV = policy_TV / policy_TV.masked_fill(is_top_TV, 0.0).sum(-1, keepdim=True)
    expected_TV = torch.where(is_top_TV, expected_TV, rest_T * share_TV)
    torch.testing.assert_close(logits_TV.grad, policy_TV - expected_TV, rtol=1e-5, atol=1e-5)


def test_top_k_kl_of_certain_models_is_finite() -> None:
    sure, never = 0.0, -1e4
    for teacher, policy in itertools.product(([sure, never], [never, sure], [-1.0, -2.0]), repeat=2):
        logprobs_TK = torch.tensor([policy], requires_grad=True)
        value_T = top_k_kl(logprobs_TK, torch.tensor([teacher]))
        value_T.sum().backward()
        assert value_T.isfinite().all() and logprobs_TK.grad.isfinite().all()
        assert (value_T.item() == pytest.approx(0.0, abs=1e-5)) is (teacher == policy)


def test_a_word_without_probability_is_one_of_the_others() -> None:
    """As the words of a teacher that the policy lacks are; whatever the policy has in their place."""
    policy_TV, teacher_TV = two_models(3, 5, 12, 1.0)
    teacher_TK, ids_TK = teacher_TV.topk(4, -1)
    words_TK = policy_TV.gather(1, ids_TK).requires_grad_()
    expected_T = top_k_kl(words_TK, teacher_TK)
    longer_TK = torch.cat([words_TK, words_TK[:, :2] - 1.0], -1)
    mine_T = top_k_kl(longer_TK, torch.cat([teacher_TK, torch.full((5, 2), -math.inf)], -1))
    torch.testing.assert_close(mine_T, expected_T)
    gradients = [torch.autograd.grad(value_T.sum(), words_TK, retain_graph=True)[0] for value_T in (mine_T, expected_T)]
    torch.testing.assert_close(*gradients)
