"""Estimators of one number per sample against formulas written out in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.algorithms import whiten_selected
from scalerl.algorithms.advantages import adv_estimator_names, get_adv_estimator, register_adv_est, whiten_by_tokens
from scalerl.config.schema import AlgorithmConfig

GRPO, DR_GRPO = AlgorithmConfig(), AlgorithmConfig(norm_adv_by_std_in_grpo=False)
PER_SAMPLE = [name for name in adv_estimator_names() if not get_adv_estimator(name).per_token]
# Of those, the ones without a column of lengths.
SCORES_ALONE = [name for name in PER_SAMPLE if not get_adv_estimator(name).needs]

groups = st.lists(
    st.tuples(st.integers(0, 4), st.floats(-100, 100, width=32, allow_subnormal=False), st.integers(0, 9)),
    min_size=1,
    max_size=24,
)


def estimate(name: str, scores, uids, lengths=None, config: AlgorithmConfig = GRPO) -> torch.Tensor:
    estimator = get_adv_estimator(name)
    columns = {"num_sampled_tokens": np.asarray(lengths)} if estimator.needs else {}
    return estimator(torch.as_tensor(scores), np.asarray(uids), config, **columns)


def by_hand(name: str, scores: list[float], uids: list, lengths: list[int], config: AlgorithmConfig) -> list[float]:
    groups = {uid: [row for row, other in enumerate(uids) if other == uid] for uid in uids}

    def mean_of(rows: list[int], weights: list[int] | None = None) -> float:
        if len(rows) == 1:
            return 0.0
        weights = [1] * len(rows) if weights is None or not sum(weights) else weights
        return math.fsum(w * scores[row] for w, row in zip(weights, rows, strict=True)) / sum(weights)

    def std_of(rows: list[int]) -> float:
        if len(rows) == 1:
            return 1.0
        mean = mean_of(rows)
        return math.sqrt(math.fsum((scores[row] - mean) ** 2 for row in rows) / (len(rows) - 1))

    def scale(rows: list[int]) -> float:
        return std_of(rows) + 1e-6 if config.norm_adv_by_std_in_grpo else 1.0

    out = []
    for row, uid in enumerate(uids):
        rows = groups[uid]
        score, n = scores[row], len(rows)
        if name == "grpo":
            out.append((score - mean_of(rows)) / scale(rows))
        elif name == "grpo_passk":
            ranked = [*sorted((scores[other] for other in rows), reverse=True), 0.0]
            winner = min(other for other in rows if scores[other] == ranked[0])
            out.append((ranked[0] - ranked[1]) / scale(rows) if row == winner else 0.0)
        elif name == "rloo":
            others = [other for other in rows if other != row]
            out.append(score - (math.fsum(scores[other] for other in others) / (n - 1) if others else 0.0))
        elif name == "opo":
            out.append(score - mean_of(rows, [lengths[other] for other in rows]))
        elif name == "gpg":
            live = [r for r, u in enumerate(uids) if len({scores[o] for o in groups[u]}) > 1 or len(groups[u]) == 1]
            out.append((score - mean_of(rows)) * (len(uids) / len(live) if live else 1.0))
        elif name == "reinforce_plus_plus_baseline":
            out.append(score - mean_of(rows))
        else:
            raise AssertionError(f"no formula for {name}")
    if name == "reinforce_plus_plus_baseline":
        tokens = [value for value, length in zip(out, lengths, strict=True) for _ in range(length)]
        mean = math.fsum(tokens) / max(len(tokens), 1)
        var = math.fsum((token - mean) ** 2 for token in tokens) / (len(tokens) - 1) if len(tokens) > 1 else 0.0
        out = [(value - mean) / math.sqrt(var + 1e-8) for value in out]
    return out


@pytest.mark.parametrize("config", [GRPO, DR_GRPO], ids=["std", "no std"])
@pytest.mark.parametrize("name", PER_SAMPLE)
@settings(max_examples=30)
@given(rows=groups)
def test_equals_the_formula(name, config, rows):
    uids, scores, lengths = ([row[at] for row in rows] for at in range(3))
    got = estimate(name, torch.tensor(scores), uids, lengths, config)
    assert got.dtype == torch.float32
    want = np.array(by_hand(name, scores, uids, lengths, config))
    if name == "reinforce_plus_plus_baseline" and np.abs(want).max() > 1e3:
        # Tokens without spread are divided by 1e-4: what rounding leaves of their difference grows with it.
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
        return
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-5)


def test_grpo_table():
    # Group 7: 1, 0, 1, 0 (mean 0.5, unbiased std sqrt(1/3)); group 3: 2, 4 (mean 3, std sqrt 2).
    scores, uids = [1.0, 2.0, 0.0, 1.0, 4.0, 0.0], [7, 3, 7, 7, 3, 7]
    half, pair = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    got = estimate("grpo", scores, uids)
    torch.testing.assert_close(got, torch.tensor([half, -pair, -half, half, pair, -half]), rtol=1e-6, atol=0)
    assert estimate("grpo", scores, uids, config=DR_GRPO).tolist() == [0.5, -1.0, -0.5, 0.5, 1.0, -0.5]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        # Groups a: 1, 0, 1, 0 and b: 2, 4, 4, with 1, 2, 3, 4 and 1, 1, 2 tokens.
        ("grpo_passk", [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        ("rloo", [2 / 3, -2 / 3, 2 / 3, -2 / 3, -2.0, 1.0, 1.0]),
        ("opo", [0.6, -0.4, 0.6, -0.4, -1.5, 0.5, 0.5]),
        ("gpg", [0.5, -0.5, 0.5, -0.5, -4 / 3, 2 / 3, 2 / 3]),
    ],
)
def test_tables(name, want):
    got = estimate(name, [1.0, 0, 1, 0, 2, 4, 4], list("aaaabbb"), [1, 2, 3, 4, 1, 1, 2], DR_GRPO)
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-6, atol=1e-7)


def test_the_best_sample_alone_earns_its_lead():
    scores, uids = [3.0, 9.0, 5.0, 1.0, 2.0], [0, 0, 0, 1, 1]
    assert estimate("grpo_passk", scores, uids, config=DR_GRPO).tolist() == [0.0, 4.0, 0.0, 0.0, 1.0]
    std = math.sqrt(np.var([3, 9, 5], ddof=1))
    assert estimate("grpo_passk", scores, uids)[1].item() == pytest.approx(4 / (std + 1e-6))


def test_groups_without_contrast_make_the_others_weigh_more():
    """Three of five samples have a gradient."""
    got = estimate("gpg", [1.0, 1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1, 1])
    torch.testing.assert_close(got, torch.tensor([0.0, 0.0, -2 / 3, 1 / 3, 1 / 3]) * 5 / 3)


@settings(max_examples=30)
@given(rows=groups)
def test_whitening_by_counts_is_whitening_of_the_tokens(rows):
    values = torch.tensor([row[1] for row in rows], dtype=torch.float64)
    lengths = torch.tensor([row[2] for row in rows])
    tokens = values.repeat_interleave(lengths)
    want = whiten_selected(tokens, torch.ones_like(tokens))
    got = whiten_by_tokens(values, lengths.double()).repeat_interleave(lengths)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in PER_SAMPLE if name != "grpo_passk"])
@settings(max_examples=30)
@given(rows=groups, seed=st.integers(0, 99))
def test_rows_may_come_in_any_order(name, rows, seed):
    uids, scores, lengths = (np.array([row[at] for row in rows]) for at in range(3))
    order = np.random.default_rng(seed).permutation(len(rows))
    first = estimate(name, scores, uids, lengths, DR_GRPO)
    second = estimate(name, scores[order], uids[order], lengths[order], DR_GRPO)
    torch.testing.assert_close(second, first[order], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", PER_SAMPLE)
@settings(max_examples=30)
@given(score=st.floats(-1e6, 1e6, allow_nan=False), n=st.integers(2, 33))
def test_equal_scores_give_exactly_zero(name, score, n):
    for dtype in (torch.float32, torch.float64):
        got = estimate(name, torch.full((n,), score, dtype=dtype), np.zeros(n, dtype=np.int64), np.arange(n))
        assert got.tolist() == [0.0] * n


def test_a_group_of_one_keeps_its_score():
    scores, uids = [5.0, 1.0, 3.0], [0, 1, 1]
    assert estimate("grpo", scores, uids)[0].item() == pytest.approx(5 / (1 + 1e-6))
    for name in ("grpo", "grpo_passk", "rloo", "opo", "gpg"):
        assert estimate(name, scores, uids, [4, 1, 1], DR_GRPO)[0].item() == 5.0


@pytest.mark.parametrize("name", PER_SAMPLE)
@settings(max_examples=30)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 2), st.floats(-1e30, 1e30), st.sampled_from([0, 1, 10**6])), min_size=1, max_size=9
    )
)
def test_any_finite_scores_give_finite_advantages(name, rows):
    uids, scores, lengths = ([row[at] for row in rows] for at in range(3))
    assert estimate(name, torch.tensor(scores, dtype=torch.float64), uids, lengths).isfinite().all()


def test_large_offset_keeps_its_digits():
    # float32 cannot tell these scores apart.
    scores = torch.tensor([1e9, 1e9 + 1, 1e9 + 2], dtype=torch.float64)
    torch.testing.assert_close(estimate("grpo", scores, np.zeros(3)), torch.tensor([-1.0, 0.0, 1.0]), rtol=2e-6, atol=0)


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_uids_may_be_strings_and_the_batch_empty(name):
    got = estimate(name, torch.tensor([1.0, 2.0, 3.0]), np.array(["a", "b", "a"], dtype=object), [1, 1, 1], DR_GRPO)
    assert got.tolist() == pytest.approx(by_hand(name, [1.0, 2.0, 3.0], ["a", "b", "a"], [1, 1, 1], DR_GRPO))
    assert estimate(name, torch.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0)).shape == (0,)


@pytest.mark.parametrize("name", PER_SAMPLE)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_named(name, bad):
    with pytest.raises(ValueError, match=r"score of sample 1 \(uid 42\)"):
        estimate(name, torch.tensor([1.0, bad]), [41, 42], [1, 1])


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_shapes_must_match(name):
    with pytest.raises(ValueError, match=r"scores \(2,\) and uids \(3,\)"):
        estimate(name, torch.zeros(2), np.zeros(3), [1, 1])


def test_unknown_name_lists_the_known_and_the_nearest():
    with pytest.raises(ValueError, match=r"algorithm.adv_estimator='grppo'.*grpo, grpo_passk.*Did you mean 'grpo'"):
        get_adv_estimator("grppo")


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match=r"'grpo' is already .*grpo"):
        register_adv_est("grpo")(lambda scores, uids, config: scores)
