"""The PPO loss against a scalar rewrite, its gradient, and the weights that aggregate it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalerl.algorithms.losses import (
    LOSS_AGG_MODES,
    aggregated,
    clip_bounds,
    get_policy_loss,
    loss_weights,
    weighted_sum,
)
from scalerl.config.schema import ActorConfig
from scalerl.tracking.metrics import merge_metrics

vanilla = get_policy_loss("vanilla")
logprob = st.floats(-30, 0)
tokens = st.lists(st.tuples(logprob, logprob, st.floats(-5, 5)), min_size=1, max_size=12)


def f64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def by_hand(new: float, old: float, adv: float, low: float, high: float, dual: float) -> tuple[float, int, int, float]:
    log_ratio = min(max(new - old, -20.0), 20.0)
    ratio = math.exp(log_ratio)
    plain, clipped = -adv * ratio, -adv * min(max(ratio, 1 - low), 1 + high)
    loss = max(plain, clipped)
    cut = adv < 0 and loss > -adv * dual
    return (-adv * dual if cut else loss), int(clipped > plain), int(cut), -log_ratio


@given(
    rows=tokens,
    low=st.floats(0, 0.9),
    high=st.floats(0, 2),
    dual=st.floats(1.01, 10),
)
def test_equals_the_formula(rows, low, high, dual):
    config = ActorConfig(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual)
    loss_T, metrics = vanilla(*(f64(column) for column in zip(*rows, strict=True)), config)
    want = np.array([by_hand(*row, low, high, dual) for row in rows])
    np.testing.assert_allclose(loss_T.numpy(), want[:, 0], rtol=1e-12)
    np.testing.assert_array_equal(metrics["actor/pg_clipfrac"].numpy(), want[:, 1])
    np.testing.assert_array_equal(metrics["actor/pg_clipfrac_lower"].numpy(), want[:, 2])
    np.testing.assert_allclose(metrics["actor/ppo_kl"].numpy(), want[:, 3], rtol=1e-12)


@pytest.mark.parametrize(
    ("ratio", "adv", "want_loss", "want_grad", "clipped", "cut"),
    [
        # d loss / d logprob = -A r inside, 0 where a clip holds the loss.
        (1.1, 1.0, -1.1, -1.1, 0, 0),
        (1.5, 1.0, -1.28, 0.0, 1, 0),  # high side
        (0.5, 1.0, -0.5, -0.5, 0, 0),  # a good token that became unlikely may always come back
        (0.5, -1.0, 0.8, 0.0, 1, 0),  # low side
        (2.0, -1.0, 2.0, 2.0, 0, 0),  # a bad token that became likely is pushed back ...
        (4.0, -1.0, 3.0, 0.0, 0, 1),  # ... until dual clip cuts it off
        (4.0, 0.0, 0.0, 0.0, 0, 0),
    ],
)
def test_regions_of_the_loss_and_its_gradient(ratio, adv, want_loss, want_grad, clipped, cut):
    config = ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)
    new = f64([math.log(ratio)]).requires_grad_()
    loss_T, metrics = vanilla(new, f64([0.0]), f64([adv]), config)
    loss_T.sum().backward()
    assert loss_T.item() == pytest.approx(want_loss)
    assert new.grad.item() == pytest.approx(want_grad)
    assert (metrics["actor/pg_clipfrac"].item(), metrics["actor/pg_clipfrac_lower"].item()) == (clipped, cut)
    assert not any(values.requires_grad for values in metrics.values())


def test_clip_ratio_alone_works_and_each_side_overrides_it():
    assert clip_bounds(ActorConfig(clip_ratio=0.3)) == (0.3, 0.3)
    assert clip_bounds(ActorConfig(clip_ratio=0.3, clip_ratio_low=0.1)) == (0.1, 0.3)
    assert clip_bounds(ActorConfig(clip_ratio=0.3, clip_ratio_high=0.4)) == (0.3, 0.4)
    assert clip_bounds(ActorConfig(clip_ratio=0.3, clip_ratio_low=0.0, clip_ratio_high=0.0)) == (0.0, 0.0)


@pytest.mark.parametrize("bad", [1.0, 0.5, math.nan])
def test_dual_clip_must_exceed_one(bad):
    with pytest.raises(ValueError, match=r"clip_ratio_c=.*over 1"):
        vanilla(torch.zeros(1), torch.zeros(1), torch.zeros(1), ActorConfig(clip_ratio_c=bad))


def test_unknown_loss_lists_the_known():
    with pytest.raises(ValueError, match=r"policy_loss.loss_mode='vanila'.*'vanilla'"):
        get_policy_loss("vanila")


# Aggregation

SCALE = 7.0

sequences = st.lists(st.lists(st.booleans(), min_size=0, max_size=6), min_size=1, max_size=10).filter(
    lambda masks: any(any(mask) for mask in masks)
)


def cu_seqlens_of(masks: list[list[bool]]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum([len(mask) for mask in masks])], dtype=torch.int64)


def aggregate_by_hand(values: list[list[float]], masks: list[list[bool]], mode: str) -> float:
    kept = [[v for v, m in zip(vs, ms, strict=True) if m] for vs, ms in zip(values, masks, strict=True)]
    kept = [vs for vs in kept if vs]
    if mode == "token-mean":
        return math.fsum(v for vs in kept for v in vs) / sum(len(vs) for vs in kept)
    if mode == "token-sum":
        return math.fsum(v for vs in kept for v in vs)
    scale = {
        "seq-mean-token-sum": lambda _: 1.0,
        "seq-mean-token-sum-norm": lambda _: SCALE,
        "seq-mean-token-mean": len,
    }
    return math.fsum(math.fsum(vs) / scale[mode](vs) for vs in kept) / len(kept)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(masks=sequences, seed=st.integers(0, 999), data=st.data())
def test_any_split_gives_the_loss_of_the_whole(mode, masks, seed, data):
    rng = np.random.default_rng(seed)
    values = [rng.normal(size=len(mask)).tolist() for mask in masks]
    num_loss_tokens, num_sequences = sum(map(sum, masks)), sum(map(any, masks))
    # Sequences go to ranks and micro-batches in any order; here each part stands for one micro-batch of some rank.
    part_of = data.draw(st.lists(st.integers(0, 3), min_size=len(masks), max_size=len(masks)))
    total = 0.0
    for part in set(part_of):
        rows = [row for row in range(len(masks)) if part_of[row] == part]
        part_masks = [masks[row] for row in rows]
        weights_T = loss_weights(
            torch.tensor([m for mask in part_masks for m in mask], dtype=torch.bool),
            cu_seqlens_of(part_masks),
            mode,
            num_loss_tokens,
            num_sequences,
            SCALE,
        )
        assert weights_T.dtype == torch.float32
        total += weighted_sum(f64([v for row in rows for v in values[row]]), weights_T.double()).item()
    assert total == pytest.approx(aggregate_by_hand(values, masks, mode), rel=1e-6, abs=1e-6)


def test_table_of_weights():
    mask, cu_seqlens = torch.tensor([0, 1, 1, 0, 0, 1, 1]), torch.tensor([0, 3, 3, 5, 6], dtype=torch.int32)
    # Sequences: [0 1 1], [], [0 0], [1]; the last token is alignment padding, whatever its mask says.
    third, half, quarter, eighth = 1 / 3, 1 / 2, 1 / 4, 1 / 8
    for mode, want in {
        "token-mean": [0, third, third, 0, 0, third, 0],
        "seq-mean-token-sum": [0, half, half, 0, 0, half, 0],
        "seq-mean-token-mean": [0, quarter, quarter, 0, 0, half, 0],
        "token-sum": [0.0, 1, 1, 0, 0, 1, 0],
        "seq-mean-token-sum-norm": [0, eighth, eighth, 0, 0, eighth, 0],
    }.items():
        torch.testing.assert_close(loss_weights(mask, cu_seqlens, mode, 3, 2, 4.0), torch.tensor(want))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(masks=sequences, seed=st.integers(0, 999), data=st.data())
def test_a_metric_merged_over_ranks_is_the_aggregate_of_the_whole(mode, masks, seed, data):
    rng = np.random.default_rng(seed)
    values = [rng.normal(size=len(mask)).tolist() for mask in masks]
    rank_of = data.draw(st.lists(st.integers(0, 2), min_size=len(masks), max_size=len(masks)))
    parts = []
    # A rank may have no sequence, or none with a token.
    for rank in range(3):
        rows = [row for row in range(len(masks)) if rank_of[row] == rank]
        # Masked tokens are NaN.
        held = [v if m else math.nan for row in rows for v, m in zip(values[row], masks[row], strict=True)]
        mask = torch.tensor([m for row in rows for m in masks[row]], dtype=torch.bool)
        parts.append({"m": aggregated(f64(held), mask, cu_seqlens_of([masks[row] for row in rows]), mode, SCALE)})
    merged = merge_metrics(parts)["m"].value
    assert merged == pytest.approx(aggregate_by_hand(values, masks, mode), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_token_of_weight_zero_never_counts(poison):
    values = torch.tensor([2.0, poison, 4.0], requires_grad=True)
    total = weighted_sum(values, torch.tensor([0.5, 0.0, 0.25]))
    total.backward()
    assert total.item() == 2.0
    assert values.grad.tolist() == [0.5, 0.0, 0.25]


def test_nan_of_a_weighted_token_shows():
    assert weighted_sum(torch.tensor([math.nan, 1.0]), torch.tensor([0.5, 0.5])).isnan()


@pytest.mark.parametrize(
    ("mode", "num_loss_tokens", "num_sequences", "message"),
    [
        ("mean", 1, 1, r"loss_agg_mode='mean'.*token-mean"),
        ("seq-mean-token-sum-norm", 1, 1, r"actor.loss_scale_factor=None: seq-mean-token-sum-norm divides by it"),
        ("token-mean", 0, 1, "num_loss_tokens=0"),
        ("seq-mean-token-mean", 1, 0, "num_sequences=0"),
    ],
)
def test_refuses(mode, num_loss_tokens, num_sequences, message):
    with pytest.raises(ValueError, match=message):
        loss_weights(torch.ones(1), torch.tensor([0, 1]), mode, num_loss_tokens, num_sequences)
