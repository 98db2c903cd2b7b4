"""The tokens of greatest covariance: against sorting in plain Python, and on every layout the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.algorithms import select_tokens, token_keys
from scalerl.config.schema import PolicyLossConfig

rows = st.lists(
    st.tuples(st.sampled_from([-3.0, -1.0, 0.0, 2.0]), st.sampled_from([-4.0, -0.5, 0.0]), st.booleans()),
    min_size=1,
    max_size=40,
)


def covariances(tokens: list[tuple[float, float]]) -> list[float]:
    means = [sum(column) / len(tokens) for column in zip(*tokens, strict=True)]
    return [(adv - means[0]) * (old - means[1]) for adv, old in tokens]


def select(given_rows, config: PolicyLossConfig, keys: torch.Tensor) -> list[int]:
    adv, old, mask = (torch.tensor(column) for column in zip(*given_rows, strict=True))
    # What a token that was not sampled holds is not looked at.
    adv, old = torch.where(mask, adv, torch.nan), torch.where(mask, old, torch.nan)
    selected = select_tokens(old, adv, mask, keys, config, int(mask.sum()))
    assert selected.dtype == torch.bool and selected.shape == mask.shape
    return selected.nonzero().squeeze(1).tolist()


@settings(max_examples=60)
@given(rows=rows, ratio=st.sampled_from([0.0002, 0.1, 0.5, 1.0]), seed=st.integers(0, 99))
def test_kl_cov_takes_the_greatest(rows, ratio, seed):
    keys = torch.randint(2**40, (len(rows),), generator=torch.Generator().manual_seed(seed))
    kept = [at for at, row in enumerate(rows) if row[2]]
    values = dict(zip(kept, covariances([rows[at][:2] for at in kept]), strict=True)) if kept else {}
    count = max(1, int(ratio * len(kept)))
    want = sorted(kept, key=lambda at: (-values[at], int(keys[at])))[:count]
    assert select(rows, PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=ratio), keys) == sorted(want)


@settings(max_examples=60)
@given(rows=rows, ratio=st.sampled_from([0.0002, 0.1, 0.5, 1.0]), seed=st.integers(0, 99))
def test_clip_cov_takes_some_inside_the_band(rows, ratio, seed):
    keys = torch.randint(2**40, (len(rows),), generator=torch.Generator().manual_seed(seed))
    kept = [at for at, row in enumerate(rows) if row[2]]
    values = dict(zip(kept, covariances([rows[at][:2] for at in kept]), strict=True)) if kept else {}
    inside = [at for at in kept if 0.25 < values[at] < 1.0]
    config = PolicyLossConfig(loss_mode="clip_cov", clip_cov_ratio=ratio, clip_cov_lb=0.25, clip_cov_ub=1.0)
    want = sorted(inside, key=lambda at: int(keys[at]))[: max(1, int(ratio * len(kept)))]
    assert select(rows, config, keys) == sorted(want)


def test_a_rank_without_tokens_selects_none():
    for mode in ("kl_cov", "clip_cov"):
        config = PolicyLossConfig(loss_mode=mode)
        nothing = torch.zeros(3, dtype=torch.bool)
        assert not select_tokens(torch.zeros(3), torch.zeros(3), nothing, torch.arange(3), config, 10).any()


def test_keys_belong_to_sample_and_place():
    alone = token_keys([(7, 3)], torch.tensor([0, 4]))
    among = token_keys([(1, 1), (7, 3), (7, 4)], torch.tensor([0, 2, 6, 10]))
    assert torch.equal(among[2:6], alone)
    assert len(set(among.tolist())) == 10
    assert ((among >= 0) & (among < 2**62)).all()


def test_keys_look_random():
    """Halves of the range, and neighbours, as coins would fall: 5 standard deviations."""
    keys = token_keys([(sample,) for sample in range(200)], torch.arange(201) * 50)
    high = (keys >= 2**61).double()
    for share in (high.mean(), (high[1:] == high[:-1]).double().mean()):
        assert share.item() == pytest.approx(0.5, abs=5 * 0.5 / 100)
