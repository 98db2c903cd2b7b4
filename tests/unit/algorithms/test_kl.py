"""KL estimators against scalar formulas and against the KL they estimate."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.algorithms.kl import KL_KINDS, kl_penalty, kl_penalty_forward

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
