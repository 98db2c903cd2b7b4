"""Group estimators against formulas written out in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalerl.algorithms.advantages import get_adv_estimator, register_adv_est
from scalerl.config.schema import AlgorithmConfig

GRPO, DR_GRPO = AlgorithmConfig(), AlgorithmConfig(norm_adv_by_std_in_grpo=False)

groups = st.lists(
    st.tuples(st.integers(0, 4), st.floats(-100, 100, width=32, allow_subnormal=False)), min_size=1, max_size=24
)


def by_hand(name: str, scores: np.ndarray, uids: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    out = np.empty(len(scores))
    for row, (score, uid) in enumerate(zip(scores, uids, strict=True)):
        group = [float(s) for s, u in zip(scores, uids, strict=True) if u == uid]
        n, mean = len(group), math.fsum(group) / len(group)
        if name == "rloo":
            out[row] = score if n == 1 else score - (math.fsum(group) - score) / (n - 1)
            continue
        mean, std = (0.0, 1.0) if n == 1 else (mean, math.sqrt(math.fsum((s - mean) ** 2 for s in group) / (n - 1)))
        out[row] = (score - mean) / (std + 1e-6) if config.norm_adv_by_std_in_grpo else score - mean
    return out


@pytest.mark.parametrize(("name", "config"), [("grpo", GRPO), ("grpo", DR_GRPO), ("rloo", GRPO)])
@given(rows=groups)
def test_equals_the_formula(name, config, rows):
    uids, scores = np.array([u for u, _ in rows]), np.array([s for _, s in rows], dtype=np.float32)
    got = get_adv_estimator(name)(torch.from_numpy(scores), uids, config)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(
        got.numpy(), by_hand(name, scores.astype(np.float64), uids, config), rtol=1e-5, atol=1e-5
    )


def test_grpo_table():
    # Group 7: 1, 0, 1, 0 (mean 0.5, unbiased std sqrt(1/3)); group 3: 2, 4 (mean 3, std sqrt 2).
    scores = torch.tensor([1.0, 2.0, 0.0, 1.0, 4.0, 0.0])
    uids = np.array([7, 3, 7, 7, 3, 7])
    half, pair = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    got = get_adv_estimator("grpo")(scores, uids, GRPO)
    torch.testing.assert_close(got, torch.tensor([half, -pair, -half, half, pair, -half]), rtol=1e-6, atol=0)
    got = get_adv_estimator("grpo")(scores, uids, DR_GRPO)
    assert got.tolist() == [0.5, -1.0, -0.5, 0.5, 1.0, -0.5]


@pytest.mark.parametrize("name", ["grpo", "rloo"])
@given(rows=groups, seed=st.integers(0, 99))
def test_rows_may_come_in_any_order(name, rows, seed):
    uids, scores = np.array([u for u, _ in rows]), torch.tensor([s for _, s in rows])
    order = np.random.default_rng(seed).permutation(len(rows))
    estimator = get_adv_estimator(name)
    torch.testing.assert_close(
        estimator(scores[order], uids[order], DR_GRPO), estimator(scores, uids, DR_GRPO)[order], rtol=1e-6, atol=1e-5
    )


@pytest.mark.parametrize("name", ["grpo", "rloo"])
@given(score=st.floats(-1e6, 1e6, allow_nan=False), n=st.integers(2, 33))
def test_equal_scores_give_exactly_zero(name, score, n):
    for dtype in (torch.float32, torch.float64):
        got = get_adv_estimator(name)(torch.full((n,), score, dtype=dtype), np.zeros(n, dtype=np.int64), GRPO)
        assert got.tolist() == [0.0] * n


def test_a_group_of_one_keeps_its_score():
    scores, uids = torch.tensor([5.0, 1.0, 3.0]), np.array([0, 1, 1])
    assert get_adv_estimator("grpo")(scores, uids, GRPO)[0].item() == pytest.approx(5 / (1 + 1e-6))
    assert get_adv_estimator("grpo")(scores, uids, DR_GRPO)[0].item() == 5.0
    assert get_adv_estimator("rloo")(scores, uids, GRPO)[0].item() == 5.0


def test_large_offset_keeps_its_digits():
    # float32 cannot tell these scores apart.
    scores = torch.tensor([1e9, 1e9 + 1, 1e9 + 2], dtype=torch.float64)
    got = get_adv_estimator("grpo")(scores, np.zeros(3), GRPO)
    torch.testing.assert_close(got, torch.tensor([-1.0, 0.0, 1.0]), rtol=2e-6, atol=0)


def test_uids_may_be_strings_and_the_batch_empty():
    got = get_adv_estimator("grpo")(torch.tensor([1.0, 2.0, 3.0]), np.array(["a", "b", "a"], dtype=object), DR_GRPO)
    assert got.tolist() == [-1.0, 2.0, 1.0]
    assert get_adv_estimator("grpo")(torch.zeros(0), np.zeros(0, dtype=np.int64), GRPO).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_named(bad):
    with pytest.raises(ValueError, match=r"score of sample 1 \(uid 42\)"):
        get_adv_estimator("grpo")(torch.tensor([1.0, bad]), np.array([41, 42]), GRPO)


def test_shapes_must_match():
    with pytest.raises(ValueError, match=r"scores \(2,\) and uids \(3,\)"):
        get_adv_estimator("grpo")(torch.zeros(2), np.zeros(3), GRPO)


def test_unknown_name_lists_the_known_and_the_nearest():
    with pytest.raises(ValueError, match=r"algorithm.adv_estimator='grppo'.*'grpo', 'rloo'.*Did you mean 'grpo'"):
        get_adv_estimator("grppo")


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match=r"'grpo' is already scalerl.algorithms.advantages.grpo"):
        register_adv_est("grpo")(lambda scores, uids, config: scores)
