"""Divergence, perplexity and outliers against loops over sequences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from scalerl.tracking.metrics import largest_differences, merge_metrics, mismatch_metrics, to_floats, worst_samples

NAN = math.nan


def batch(num_sequences: int = 20, spread: float = 0.2):
    """(rollout_T, old_T, mask_T, cu_seqlens); every fifth sequence has no sampled token, every fourth just one."""
    generator = np.random.default_rng(0)
    rows = []
    for row in range(num_sequences):
        num_response = 0 if row % 5 == 4 else 1 if row % 4 == 1 else int(generator.integers(2, 9))
        length = int(generator.integers(1, 4)) + num_response
        rollout = -generator.random(length) * 4
        old = rollout + spread * generator.standard_normal(length)
        rows.append((rollout, old, np.arange(length) >= length - num_response))
    columns = [np.concatenate(column) for column in zip(*rows, strict=True)]
    columns[0][~columns[2]] = columns[1][~columns[2]] = NAN
    return (*map(torch.tensor, columns), torch.tensor([0, *np.cumsum([len(row[0]) for row in rows])]))


def sequences(rollout_T, old_T, mask_T, cu_seqlens):
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        keep = mask_T[start:end].numpy().astype(bool)
        yield rollout_T[start:end].numpy()[keep], old_T[start:end].numpy()[keep]


def test_equals_a_loop_over_sequences():
    columns = batch()
    logprob_pairs = [(x, y) for x, y in sequences(*columns) if len(x)]
    ratio = np.exp(np.concatenate([y - x for x, y in logprob_pairs]))
    ratio_seq = np.array([np.exp(y).prod() / np.exp(x).prod() for x, y in logprob_pairs])
    ppl_old = np.array([np.exp(y).prod() ** (-1 / len(y)) for _, y in logprob_pairs])
    ppl_rollout = np.array([np.exp(x).prod() ** (-1 / len(x)) for x, _ in logprob_pairs])
    relative = np.log(ppl_old / ppl_rollout)
    want = {
        "kl": -np.log(ratio).mean(),
        "k3_kl": (ratio - 1 - np.log(ratio)).mean(),
        "chi2_token": (ratio**2).mean() - 1,
        "chi2_seq": (ratio_seq**2).mean() - 1,
        "training_ppl": ppl_old.mean(),
        "training_log_ppl": np.log(ppl_old).mean(),
        "rollout_ppl": ppl_rollout.mean(),
        "rollout_log_ppl": np.log(ppl_rollout).mean(),
        "ppl_ratio": (ppl_old / ppl_rollout).mean(),
        "log_ppl_diff": relative.mean(),
        "log_ppl_abs_diff": np.abs(relative).mean(),
        "log_ppl_diff_max": relative.max(),
        "log_ppl_diff_min": relative.min(),
        "seq_log_ratio_max": np.log(ratio_seq).max(),
        "seq_log_ratio_min": np.log(ratio_seq).min(),
        "token_log_ratio_max": np.log(ratio).max(),
        "token_log_ratio_min": np.log(ratio).min(),
    }
    got = to_floats(mismatch_metrics(*columns))
    assert got == pytest.approx({f"rollout_corr/{key}": value for key, value in want.items()}, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("cuts", [[10], [4, 5], [1, 2, 2, 19], list(range(1, 20))])
def test_any_split_of_the_sequences_gives_the_whole(cuts):
    """4, 5: a part without a sampled token.  2, 2: a part without a sequence."""
    *tokens, cu_seqlens = batch()
    parts = []
    for start, end in zip([0, *cuts], [*cuts, 20], strict=True):
        piece = slice(int(cu_seqlens[start]), int(cu_seqlens[end]))
        parts.append(mismatch_metrics(*(c[piece] for c in tokens), cu_seqlens[start : end + 1] - cu_seqlens[start]))
    metrics, want = to_floats(merge_metrics(parts)), to_floats(mismatch_metrics(*tokens, cu_seqlens))
    assert metrics.keys() == want.keys()
    for key, value in want.items():
        exact = key.endswith(("_max", "_min"))
        assert metrics[key] == (value if exact else pytest.approx(value, rel=1e-12, abs=1e-15)), key


def test_equal_log_probs_differ_by_nothing():
    rollout, _, mask, cu_seqlens = batch()
    metrics = to_floats(mismatch_metrics(rollout, rollout.clone(), mask, cu_seqlens))
    zero = {key: value for key, value in metrics.items() if "ppl" not in key or "diff" in key}
    assert set(zero.values()) == {0.0} and metrics["rollout_corr/ppl_ratio"] == 1.0
    assert metrics["rollout_corr/training_ppl"] == metrics["rollout_corr/rollout_ppl"] > 1


def test_k3_of_a_small_gap_keeps_its_digits():
    gap = 1e-8
    metrics = to_floats(mismatch_metrics(torch.zeros(1), f64([gap]), torch.ones(1), torch.tensor([0, 1])))
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(gap**2 / 2, rel=1e-6, abs=0)


def f64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("gap", [1e4, -1e4, 1e30, -1e30])
def test_finite_for_any_gap(gap):
    metrics = mismatch_metrics(f64([0.0, 0.0]), f64([gap, 0.1]), torch.ones(2), torch.tensor([0, 2]))
    assert all(math.isfinite(value) for value in to_floats(metrics).values())


def test_nothing_sampled_has_no_metrics():
    rollout, old, mask, cu_seqlens = batch()
    assert mismatch_metrics(rollout, old, mask & False, cu_seqlens) == {}
    assert mismatch_metrics(rollout[:0], old[:0], mask[:0], cu_seqlens[:1]) == {}


def test_padding_after_the_last_sequence_does_not_count():
    columns = batch()
    padded = [torch.cat([column, column[:1].new_ones(4)]) for column in columns[:3]]
    assert mismatch_metrics(*padded, columns[3]) == mismatch_metrics(*columns)
    for of_padded, want in zip(largest_differences(*padded, columns[3]), largest_differences(*columns), strict=True):
        np.testing.assert_array_equal(of_padded, want)


def test_a_nan_of_a_sampled_token_shows():
    metrics = to_floats(mismatch_metrics(f64([0.0, 0.0]), f64([0.0, NAN]), torch.ones(2), torch.tensor([0, 2])))
    assert math.isnan(metrics["rollout_corr/kl"]) and math.isnan(metrics["rollout_corr/log_ppl_diff_max"])


def test_largest_differences_equal_a_loop():
    rollout, old, mask, cu_seqlens = batch()
    differences, positions = largest_differences(rollout, old, mask, cu_seqlens)
    for row, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        of_tokens = {t: abs(float(old[start + t] - rollout[start + t])) for t in range(end - start) if mask[start + t]}
        worst = max(of_tokens, key=of_tokens.get, default=-1)
        assert (differences[row], positions[row]) == (of_tokens.get(worst, 0.0), worst)


def test_positions_of_equals_nan_and_infinity():
    # Rows: equals; a NaN beside a larger gap; the sampler's log-prob is -inf; both are.
    rollout = f64([NAN, 0, 0, 0, 0, 0, -math.inf, 0, -math.inf])
    old = f64([0, 1.0, -1.0, 50.0, NAN, 0, 0, 1.0, -math.inf])
    mask = torch.tensor([0, 1, 1, 1, 1, 1, 1, 1, 1])
    differences, positions = largest_differences(rollout, old, mask, torch.tensor([0, 3, 5, 7, 9]))
    np.testing.assert_array_equal(differences, [1.0, NAN, math.inf, NAN])
    assert positions.tolist() == [1, 1, 1, 1]
    assert worst_samples(differences, 3).tolist() == [1, 3, 2]


def test_worst_samples_come_in_order_and_agreement_is_no_outlier():
    assert worst_samples(np.array([0.1, 0.0, 3.0, 3.0, 0.5]), 9).tolist() == [2, 3, 4, 0]
    assert worst_samples(np.array([0.1, 0.0, 3.0, 3.0, 0.5]), 2).tolist() == [2, 3]
    assert worst_samples(np.zeros(3), 2).tolist() == worst_samples(np.zeros(0), 2).tolist() == []
