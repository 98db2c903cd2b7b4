from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalerl.rollout.servers.embedded.sampling import SampleSettings, counter_uniform, sample

NUM_DRAWS = 4000


def splitmix64(state: int) -> int:
    """One step of the reference implementation, in Python integers."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**20))
def test_uniforms_are_splitmix64_of_seed_and_position(seed: int, position: int) -> None:
    mask = (1 << 64) - 1
    # The generator's state after `seed` steps from 0, then after `position` steps from that step's output.
    first = splitmix64(seed * 0x9E3779B97F4A7C15 & mask)
    second = splitmix64((first + (position - 1) * 0x9E3779B97F4A7C15) & mask)
    (uniform,) = counter_uniform(np.array([seed]), np.array([position]))
    assert uniform == (second >> 11) / 2**53


def test_uniforms_of_neighbouring_seeds_and_positions_are_independent() -> None:
    grid = counter_uniform(np.repeat(np.arange(200), 200), np.tile(np.arange(200), 200)).reshape(200, 200)
    assert grid.min() >= 0.0
    assert grid.max() < 1.0
    assert abs(grid.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02


def distribution(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """What SGLang's sampler draws from, in numpy."""
    probs = np.exp(logits / temperature - np.max(logits / temperature))
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    mass_before = np.cumsum(probs[order]) - probs[order]
    keep = (mass_before <= top_p) & (np.arange(len(probs)) < (top_k if top_k > 0 else len(probs)))
    kept = np.zeros_like(probs)
    kept[order[keep]] = probs[order[keep]]
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, -1), (0.5, 1.0, -1), (1.0, 0.7, -1), (1.5, 0.9, 4)]
)
def test_draws_follow_the_truncated_tempered_distribution(temperature: float, top_p: float, top_k: int) -> None:
    logits = np.array([2.0, -1.0, 0.5, 3.0, 0.5, -4.0, 1.0])
    expected = distribution(logits, temperature, top_p, top_k)
    batch = [SampleSettings(temperature, top_p, top_k, seed) for seed in range(NUM_DRAWS)]
    rows = torch.tensor(logits, dtype=torch.float32).repeat(NUM_DRAWS, 1)
    tokens, logprobs = sample(rows, batch, [17] * NUM_DRAWS)
    counts = np.bincount(tokens, minlength=len(logits))
    assert (counts[expected == 0] == 0).all()
    # Five standard deviations of a binomial; the draws are fixed, so this cannot flicker.
    assert (np.abs(counts / NUM_DRAWS - expected) <= 5 * np.sqrt(expected / NUM_DRAWS)).all()
    full = distribution(logits, temperature, 1.0, -1)
    np.testing.assert_allclose(np.exp(logprobs), full[tokens], rtol=1e-5)


def test_rows_of_a_batch_do_not_touch_each_other() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 3
    batch = [
        SampleSettings(0.0, 1.0, -1, 1),
        SampleSettings(1.0, 0.4, -1, 2),
        SampleSettings(0.6, 1.0, 3, 3),
        SampleSettings(1.0, 1.0, -1, 4),
        SampleSettings(0.0, 0.3, 2, 5),
        SampleSettings(2.0, 0.9, 9, 6),
    ]
    positions = [0, 5, 9, 2, 1, 7]
    tokens, logprobs = sample(logits, batch, positions)
    for row in range(6):
        token, logprob = sample(logits[row : row + 1], [batch[row]], [positions[row]])
        assert (token[0], logprob[0]) == (tokens[row], pytest.approx(logprobs[row], abs=1e-6))
    assert tokens[0] == int(logits[0].argmax())
    assert tokens[4] == int(logits[4].argmax())


def test_a_greedy_log_prob_is_at_temperature_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    (token,), (logprob,) = sample(logits, [SampleSettings(0.0, 1.0, -1, 0)], [0])
    assert token == 1
    assert logprob == pytest.approx(3.0 - np.log(np.exp([1.0, 3.0, 2.0]).sum()), abs=1e-6)


def test_a_token_without_weight_is_never_drawn() -> None:
    logits = torch.tensor([[0.0, -float("inf"), 0.0, -float("inf")]]).repeat(500, 1)
    tokens, _ = sample(logits, [SampleSettings(1.0, 1.0, -1, seed) for seed in range(500)], [0] * 500)
    assert set(tokens) == {0, 2}
