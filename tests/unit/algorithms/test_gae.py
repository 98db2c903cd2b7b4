"""Token-level advantages against sums of n-step returns, in plain Python, on each sequence alone."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scalerl.algorithms import gae, rewards_at_last_token
from scalerl.batch.data_proto import cu_seqlens_of

FACTORS = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])
NUMBERS = st.floats(-3, 3, width=32)
TOKEN = st.tuples(NUMBERS, NUMBERS, st.booleans())
BATCH = st.lists(st.lists(TOKEN, max_size=12), max_size=6)


def columns(rows: list[list[tuple[float, float, bool]]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(reward, value, mask) per token -> rewards, values, mask, cu_seqlens."""
    tokens = [token for row in rows for token in row]
    rewards, values, mask = ([token[at] for token in tokens] for at in range(3))
    cu_seqlens = cu_seqlens_of([len(row) for row in rows])
    return torch.tensor(rewards), torch.tensor(values), torch.tensor(mask, dtype=torch.bool), cu_seqlens


def n_step(rewards: list[float], values: list[float], t: int, n: int, gamma: float) -> float:
    """r_t + gamma r_t+1 + ... + gamma^n V_t+n - V_t, with V = 0 after the end."""
    total = sum(gamma**k * rewards[t + k] for k in range(n))
    return total + (gamma**n * values[t + n] if t + n < len(values) else 0.0) - values[t]


def mixture_of_n_steps(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """(1 - lam) sum_n lam^(n-1) A^(n), the last of which stands for all longer ones."""
    advantages = []
    for t in range(len(rewards)):
        steps = [n_step(rewards, values, t, n, gamma) for n in range(1, len(rewards) - t + 1)]
        weights = [(1 - lam) * lam**n for n in range(len(steps) - 1)] + [lam ** (len(steps) - 1)]
        advantages.append(sum(weight * step for weight, step in zip(weights, steps, strict=True)))
    return advantages


def expected(rows: list[list[tuple[float, float, bool]]], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    advantages, returns = [], []
    for row in rows:
        kept = [token for token in row if token[2]]
        of_kept = iter(mixture_of_n_steps([r for r, _, _ in kept], [v for _, v, _ in kept], gamma, lam))
        for _, value, is_response in row:
            advantages.append(next(of_kept) if is_response else 0.0)
            returns.append(advantages[-1] + value if is_response else 0.0)
    return advantages, returns


@given(rows=BATCH, gamma=FACTORS, lam=FACTORS)
def test_is_the_mixture_of_n_step_advantages_of_the_response_tokens_alone(rows, gamma, lam):
    for column, want in zip(gae(*columns(rows), gamma=gamma, lam=lam), expected(rows, gamma, lam), strict=True):
        assert column.dtype == torch.float32
        assert column.tolist() == pytest.approx(want, rel=1e-5, abs=1e-5)


def test_by_hand_with_an_observation_inside():
    # prompt, response 1, observation, response 2, response 3; then a sequence of one response token.
    rewards = torch.tensor([7.0, 0.0, 7.0, 0.5, 1.0, 2.0])
    values = torch.tensor([7.0, 1.0, 7.0, 2.0, 4.0, 3.0])
    mask = torch.tensor([0, 1, 0, 1, 1, 1])
    advantages, returns = gae(rewards, values, mask, torch.tensor([0, 5, 6]), gamma=0.5, lam=0.5)
    # deltas: 0 + 1 - 1 = 0, 0.5 + 2 - 2 = 0.5, 1 - 4 = -3; discount 0.25.
    assert advantages.tolist() == [0.0, 0.25 * (0.5 - 0.75), 0.0, 0.5 - 0.75, -3.0, -1.0]
    assert returns.tolist() == [0.0, 0.9375, 0.0, 1.75, 1.0, 2.0]


def random_batch(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = torch.rand(total, generator=generator) < 0.6
    return *torch.randn(2, total, generator=generator), mask, cu_seqlens_of(lengths)


MANY = [70_000, 0, 3, 20_000, 50_000, 1, 65_536, 0, 2]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0)])
@pytest.mark.parametrize("lengths", [[3, 0, 130, 1, 64, 65], MANY], ids=["few", "many"])
def test_sequences_do_not_see_each_other(lengths, gamma, lam):
    rewards, values, mask, cu_seqlens = random_batch(lengths)
    whole = gae(rewards, values, mask, cu_seqlens, gamma=gamma, lam=lam)
    parts = [column.split(lengths) for column in (rewards, values, mask)]
    alone = [gae(*row, cu_seqlens_of([len(row[0])]), gamma=gamma, lam=lam) for row in zip(*parts, strict=True)]
    for together, pieces in zip(whole, zip(*alone, strict=True), strict=True):
        assert torch.equal(together, torch.cat(pieces))


def test_a_token_among_many_that_is_not_finite_is_named():
    rewards, values, mask, cu_seqlens = random_batch(MANY)
    values[120_000] = math.nan
    with pytest.raises(ValueError, match=r"value of response token 29997 of sequence 4 is nan"):
        gae(rewards, values, torch.ones_like(mask), cu_seqlens, gamma=1.0, lam=0.95)


def test_types_of_the_columns_do_not_matter():
    rewards, values, mask, cu_seqlens = random_batch([30, 9])
    want = gae(rewards, values, mask, cu_seqlens, gamma=1.0, lam=0.95)
    advantages_and_returns = gae(rewards.double(), values.double(), mask.long(), cu_seqlens.int(), gamma=1.0, lam=0.95)
    assert all(column.dtype == torch.float32 for column in advantages_and_returns)
    assert all(torch.equal(left, right) for left, right in zip(advantages_and_returns, want, strict=True))


def test_inputs_stay_as_they_are_and_outputs_have_no_gradient():
    rewards, values, mask, cu_seqlens = random_batch([30, 9])
    before = values.clone(), rewards.clone()
    advantages, returns = gae(rewards, values.requires_grad_(), mask, cu_seqlens, gamma=1.0, lam=1.0)
    assert not advantages.requires_grad
    assert not returns.requires_grad
    assert torch.equal(values, before[0])
    assert torch.equal(rewards, before[1])


def test_a_small_reward_survives_large_values():
    # float32 sums would lose 1 beside 1e8.
    values = torch.tensor([1e8, -1e8, 1e8, 0.0])
    rewards = torch.tensor([0.0, 0.0, 0.0, 1.0])
    _, returns = gae(rewards, values, torch.ones(4), torch.tensor([0, 4]), gamma=1.0, lam=1.0)
    assert returns.tolist() == [1.0, 1.0, 1.0, 1.0]


def test_extreme_values_stay_finite():
    values = torch.tensor([1e30, -1e30, 1e-30, 0.0]).repeat(50)
    for lam in (0.0, 0.95, 1.0):
        for column in gae(-values, values, torch.ones(200), torch.tensor([0, 200]), gamma=1.0, lam=lam):
            assert column.isfinite().all()


def test_a_long_response_has_the_closed_form_of_constant_rewards():
    # Longer than any power of two that a shorter test reaches; V = 0: R_t = (1 - discount^rest) / (1 - discount).
    num_tokens, discount = 3000, 0.999
    ones, zeros = torch.ones(num_tokens), torch.zeros(num_tokens)
    _, returns = gae(ones, zeros, ones, torch.tensor([0, num_tokens]), gamma=discount, lam=1.0)
    rest = torch.arange(num_tokens, 0, -1, dtype=torch.float64)
    torch.testing.assert_close(returns.double(), (1 - discount**rest) / (1 - discount), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["gamma", "lam"])
@pytest.mark.parametrize("factor", [-0.1, 1.1, math.nan])
def test_factors_outside_the_unit_interval_are_refused(name, factor):
    with pytest.raises(ValueError, match=rf"algorithm\.{name}=.* must be in \[0, 1\]"):
        gae(*random_batch([3]), **{"gamma": 1.0, "lam": 1.0, name: factor})


@pytest.mark.parametrize(("column", "what"), [(0, "reward"), (1, "value")])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(("at", "number"), [(3, 0), (5, 1)])
def test_a_response_token_that_is_not_finite_is_named(column, what, poison, at, number):
    batch = list(random_batch([2, 0, 5]))
    batch[2] = torch.tensor([1, 1, 0, 1, 0, 1, 1])
    batch[column][at] = poison
    with pytest.raises(ValueError, match=rf"{what} of response token {number} of sequence 2 is {poison}:"):
        gae(*batch, gamma=1.0, lam=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(4)}, r"rewards \(4,\) must be \[tokens\], as response_mask: \(5,\)"),
        ({1: torch.zeros(5, 1)}, r"values \(5, 1\)"),
        ({3: torch.tensor([0, 4])}, r"cu_seqlens \[0, 4\] must go from 0 to the number of tokens, 5"),
        ({3: torch.tensor([1, 5])}, r"cu_seqlens \[1, 5\]"),
        ({3: torch.tensor([], dtype=torch.int64)}, r"cu_seqlens \[\]"),
    ],
)
def test_shapes_that_do_not_match_are_named(change, message):
    batch = [column for at, old in enumerate(random_batch([5])) for column in [change.get(at, old)]]
    with pytest.raises(ValueError, match=message):
        gae(*batch, gamma=1.0, lam=1.0)


def test_rewards_are_on_the_last_response_token():
    mask = torch.tensor([0, 1, 1, 0, 0, 0, 1, 1], dtype=torch.bool)
    scores = torch.tensor([0.5, 9.0, 9.0, -2.0], dtype=torch.float64)
    rewards = rewards_at_last_token(scores, mask, torch.tensor([0, 4, 6, 6, 8]))
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, -2.0]


@given(rows=st.lists(st.tuples(NUMBERS, st.lists(st.booleans(), max_size=9)), max_size=6))
def test_each_sequence_has_its_score_once_if_it_has_a_response(rows):
    scores, masks = torch.tensor([score for score, _ in rows]), [mask for _, mask in rows]
    mask_T = torch.tensor([is_response for mask in masks for is_response in mask], dtype=torch.bool)
    rewards = rewards_at_last_token(scores, mask_T, cu_seqlens_of([len(mask) for mask in masks])).tolist()
    for score, mask in rows:
        mine, rewards = rewards[: len(mask)], rewards[len(mask) :]
        last = max((at for at, is_response in enumerate(mask) if is_response), default=None)
        assert mine == [score if at == last else 0.0 for at in range(len(mask))]


def test_no_score_is_lost_between_reward_and_return():
    # Undiscounted, the first response token's return is the score, whatever the critic says.
    _, values, mask, cu_seqlens = random_batch([20, 33, 7])
    scores = torch.tensor([1.0, -1.0, 0.25])
    rewards = rewards_at_last_token(scores, mask, cu_seqlens)
    _, returns = gae(rewards, values, mask, cu_seqlens, gamma=1.0, lam=1.0)
    firsts = [int(start + mask[start:end].nonzero()[0]) for start, end in pairwise(cu_seqlens)]
    assert returns[firsts].tolist() == pytest.approx(scores.tolist(), abs=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_named(poison):
    with pytest.raises(ValueError, match=rf"score of sequence 1 is {poison} \(1 of 2 are not finite"):
        rewards_at_last_token(torch.tensor([0.0, poison]), torch.ones(4), torch.tensor([0, 2, 4]))


def test_as_many_scores_as_sequences():
    with pytest.raises(ValueError, match=r"scores \(3,\) must be \[number of sequences\], here \(2,\)"):
        rewards_at_last_token(torch.zeros(3), torch.ones(4), torch.tensor([0, 2, 4]))
