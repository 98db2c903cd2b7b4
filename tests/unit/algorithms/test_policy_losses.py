"""Every policy loss through the objective, against plain Python loops: value, gradient, aggregation, invariance."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.algorithms import LOSS_AGG_MODES, PolicyObjective, policy_loss_names
from scalerl.config.schema import ActorConfig, PolicyLossConfig

LOW, HIGH, DUAL, TAU_POS, TAU_NEG, KL_COEF, BETA, SCALE = 0.2, 0.3, 3.0, 1.5, 0.7, 0.25, 0.6, 40.0
BOUND = 20.0


@dataclass(frozen=True)
class Sample:
    """Of its tokens: log-probs now and before, advantage, whether the policy sampled them, whether selected."""

    new: list[float]
    old: list[float]
    adv: list[float]
    mask: list[bool]
    selected: list[bool]

    @property
    def kept(self) -> list[int]:
        return [at for at, on in enumerate(self.mask) if on]


# name -> of a sample: the loss of each sampled token. Floats may be a dual number (`Dual`).
def _delta(sample: Sample, new: list, at: int):
    return clip(new[at] - sample.old[at], -BOUND, BOUND)


def _vanilla(s: Sample, new: list, at: int):
    ratio, adv = exp(_delta(s, new, at)), s.adv[at]
    loss = larger(-adv * ratio, -adv * clip(ratio, 1 - LOW, 1 + HIGH))
    return smaller(loss, Dual(-adv * DUAL)) if adv < 0 else loss


def _gspo(s: Sample, new: list, at: int):
    # The value of the sequence's ratio; only this token's log-prob moves it.
    mean = math.fsum(_delta(s, new, k).value for k in s.kept) / len(s.kept)
    ratio = exp(Dual(mean, new[at].slopes))
    return larger(-s.adv[at] * ratio, -s.adv[at] * clip(ratio, 1 - LOW, 1 + HIGH))


def _geo_mean(s: Sample, new: list, at: int):
    total = Dual(0.0)
    for k in s.kept:
        sign = (s.adv[k] > 0) - (s.adv[k] < 0)
        delta = _delta(s, new, k)
        total = total + sign * smaller(sign * delta, sign * clip(delta, -LOW, HIGH))
    return -s.adv[at] * exp(total * (1 / len(s.kept)))


def _cispo(s: Sample, new: list, at: int):
    weight = min(max(math.exp(_delta(s, new, at).value), 1 - LOW), 1 + HIGH)
    return -weight * s.adv[at] * new[at]


def _sapo(s: Sample, new: list, at: int):
    tau = TAU_POS if s.adv[at] > 0 else TAU_NEG
    return -s.adv[at] * (4 / tau) * sigmoid(tau * (exp(_delta(s, new, at)) + -1.0))


def _gpg(s: Sample, new: list, at: int):
    return -s.adv[at] * new[at]


def _dro(s: Sample, new: list, at: int):
    gap = new[at].value - s.old[at]
    return -s.adv[at] * new[at] + Dual(BETA / 2 * gap**2, {at: BETA * gap})


def _clip_cov(s: Sample, new: list, at: int):
    ratio = exp(_delta(s, new, at))
    if s.selected[at]:
        return Dual(0.0)
    return larger(-s.adv[at] * ratio, -s.adv[at] * clip(ratio, 1 - LOW, 1 + HIGH))


def _kl_cov(s: Sample, new: list, at: int):
    delta = _delta(s, new, at)
    # At 0, where the absolute value has a corner: no slope.
    size = ((delta.value > 0) - (delta.value < 0)) * delta
    penalty = KL_COEF * size if s.selected[at] else Dual(0.0)
    return -s.adv[at] * exp(delta) + penalty


FORMULAS: dict[str, Callable] = {
    "vanilla": _vanilla,
    "gspo": _gspo,
    "geo_mean": _geo_mean,
    "cispo": _cispo,
    "sapo": _sapo,
    "gpg": _gpg,
    "dro": _dro,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
}


class Dual:
    """A number and its slopes by each log-prob (token -> slope): exact derivatives without torch."""

    def __init__(self, value: float, slopes: dict[int, float] | None = None) -> None:
        self.value, self.slopes = value, slopes or {}

    def __add__(self, other):
        other = other if isinstance(other, Dual) else Dual(other)
        keys = self.slopes.keys() | other.slopes.keys()
        return Dual(self.value + other.value, {k: self.slopes.get(k, 0.0) + other.slopes.get(k, 0.0) for k in keys})

    def __sub__(self, other: float):
        return Dual(self.value - other, self.slopes)

    def __mul__(self, factor: float):
        return Dual(self.value * factor, {k: v * factor for k, v in self.slopes.items()})

    __rmul__ = __mul__


def exp(x: Dual) -> Dual:
    return Dual(math.exp(x.value), {k: v * math.exp(x.value) for k, v in x.slopes.items()})


def sigmoid(x: Dual) -> Dual:
    y = 1 / (1 + math.exp(-x.value)) if x.value > -700 else 0.0
    return Dual(y, {k: v * y * (1 - y) for k, v in x.slopes.items()})


def clip(x: Dual, low: float, high: float) -> Dual:
    return x if low <= x.value <= high else Dual(min(max(x.value, low), high))


def larger(a: Dual, b: Dual) -> Dual:
    return a if a.value >= b.value else b


def smaller(a: Dual, b: Dual) -> Dual:
    return a if a.value <= b.value else b


def by_hand(name: str, samples: list[Sample], mode: str) -> tuple[float, list[list[float]]]:
    """(loss, its gradient by each log-prob): loops over tokens, then the aggregation's definition."""
    kept = [sample for sample in samples if sample.kept]
    num_tokens = sum(len(sample.kept) for sample in kept)
    total, gradients = 0.0, []
    for sample in samples:
        new = [Dual(value, {at: 1.0}) for at, value in enumerate(sample.new)]
        slopes = [0.0] * len(new)
        for at in sample.kept:
            loss = FORMULAS[name](sample, new, at)
            weight = {
                "token-mean": 1 / num_tokens,
                "token-sum": 1.0,
                "seq-mean-token-sum": 1 / len(kept),
                "seq-mean-token-sum-norm": 1 / len(kept) / SCALE,
                "seq-mean-token-mean": 1 / len(kept) / len(sample.kept),
            }[mode]
            total += weight * loss.value
            for k, slope in loss.slopes.items():
                slopes[k] += weight * slope
        gradients.append(slopes)
    return total, gradients


def config_of(name: str, mode: str = "token-mean") -> ActorConfig:
    return ActorConfig(
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=DUAL,
        tau_pos=TAU_POS,
        tau_neg=TAU_NEG,
        loss_agg_mode=mode,
        loss_scale_factor=SCALE,
        policy_loss=PolicyLossConfig(loss_mode=name, ppo_kl_coef=KL_COEF, dro_beta=BETA),
    )


def counts(samples: list[Sample]) -> tuple[int, int]:
    return sum(len(sample.kept) for sample in samples), sum(bool(sample.kept) for sample in samples)


def packed(samples: list[Sample], dtype=torch.float64) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    def column(name: str, kind) -> torch.Tensor:
        return torch.tensor([value for sample in samples for value in getattr(sample, name)], dtype=kind)

    columns = {
        "old_logprobs": column("old", dtype),
        "advantages": column("adv", dtype),
        "response_mask": column("mask", torch.bool),
        "selected": column("selected", torch.bool),
        "cu_seqlens": torch.tensor([0, *torch.tensor([len(s.new) for s in samples]).cumsum(0).tolist()]),
    }
    return column("new", dtype).requires_grad_(), columns


def run(name: str, parts: list[list[Sample]], mode: str, dtype=torch.float64):
    """Sums over micro-batches: (loss, metrics, gradient of each sample by its id)."""
    objective = PolicyObjective(config_of(name, mode), *counts([sample for part in parts for sample in part]))
    total, metrics, gradients = 0.0, {}, {}
    for part in parts:
        new, columns = packed(part, dtype)
        loss, part_metrics = objective(new, None, columns)
        loss.backward()
        total += loss.item()
        for key, value in part_metrics.items():
            metrics[key] = metrics.get(key, 0.0) + value.item()
        pieces = new.grad.split([len(sample.new) for sample in part])
        gradients |= {id(sample): piece.tolist() for sample, piece in zip(part, pieces, strict=True)}
    return total, metrics, gradients


def draw(seed: int, *, gap: float = 1.0, per_token: bool = False) -> list[Sample]:
    rng = random.Random(seed)
    samples = []
    for length in (4, 1, 6, 2, 5):
        old = [-3 * rng.random() for _ in range(length)]
        adv = rng.gauss(0, 1)
        samples.append(
            Sample(
                new=[value + rng.gauss(0, gap) for value in old],
                old=old,
                adv=[rng.gauss(0, 1) if per_token else adv for _ in range(length)],
                mask=[rng.random() < 0.7 for _ in range(length)],
                selected=[rng.random() < 0.3 for _ in range(length)],
            )
        )
    # One has a token at least, and the last has none.
    samples[0].mask[0] = True
    return [*samples[:-1], replace(samples[-1], mask=[False] * 5)]


def test_every_loss_has_a_formula_here():
    assert set(policy_loss_names()) == set(FORMULAS)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=25)
@given(seed=st.integers(0, 9999), gap=st.sampled_from([0.0, 0.1, 1.0, 30.0]), per_token=st.booleans())
def test_equals_the_formula(name, mode, seed, gap, per_token):
    samples = draw(seed, gap=gap, per_token=per_token)
    loss, _, gradients = run(name, [samples], mode)
    want, slopes = by_hand(name, samples, mode)
    # Weights are float32; sums of large terms of both signs lose digits of the largest.
    size = max(1.0, *(abs(value) for row in slopes for value in row))
    assert loss == pytest.approx(want, rel=1e-6, abs=1e-6 * size)
    for sample, row in zip(samples, slopes, strict=True):
        assert gradients[id(sample)] == pytest.approx(row, rel=1e-6, abs=1e-6 * size)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=10)
@given(seed=st.integers(0, 99), part_of=st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_no_split_changes_loss_metrics_or_gradient(name, mode, seed, part_of):
    samples = draw(seed)
    order = random.Random(seed).sample(range(5), 5)
    parts = [[samples[row] for row in order if part_of[row] == part] for part in sorted(set(part_of))]
    loss, metrics, gradients = run(name, parts, mode)
    whole_loss, whole_metrics, whole_gradients = run(name, [samples], mode)
    assert loss == pytest.approx(whole_loss, rel=1e-9, abs=1e-12)
    assert metrics == pytest.approx(whole_metrics, rel=1e-9, abs=1e-12)
    for sample in samples:
        # An element's last bit depends on where in a vector it is computed.
        assert gradients[id(sample)] == pytest.approx(whole_gradients[id(sample)], rel=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_fresh_policy_has_the_policy_gradient_and_clips_nothing(name):
    samples = [replace(sample, new=sample.old, selected=[False] * len(sample.old)) for sample in draw(3)]
    _, metrics, gradients = run(name, [samples], "seq-mean-token-mean")
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics.get("actor/pg_clipfrac", 0.0) == metrics.get("actor/pg_clipfrac_lower", 0.0) == 0.0
    kept = [sample for sample in samples if sample.kept]
    for sample in kept:
        want = [
            -adv / len(sample.kept) / len(kept) if on else 0.0 for adv, on in zip(sample.adv, sample.mask, strict=True)
        ]
        assert gradients[id(sample)] == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("adv", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("gap", [1e4, -1e4])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("name", FORMULAS)
def test_any_gap_is_finite(name, length, gap, adv):
    ones = [True] * length
    sample = Sample([gap / 2] * length, [-gap / 2] * length, [adv] * length, ones, ones)
    for dtype in (torch.float32, torch.float64):
        loss, metrics, gradients = run(name, [[sample]], "token-mean", dtype)
        assert all(math.isfinite(value) for value in (loss, *metrics.values(), *gradients[id(sample)]))


@pytest.mark.parametrize("beta", [None, 0.0, -1.0, math.nan])
def test_dro_needs_its_weight(beta):
    samples = draw(1)
    config = replace(config_of("dro"), policy_loss=PolicyLossConfig(loss_mode="dro", dro_beta=beta))
    with pytest.raises(ValueError, match=r"dro_beta=.*number over 0"):
        PolicyObjective(config, *counts(samples))(*packed(samples)[:1], None, packed(samples)[1])
