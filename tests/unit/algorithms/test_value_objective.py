"""The critic's objective on packed micro-batches: loss, gradient and metrics against plain Python per token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.algorithms import LOSS_AGG_MODES, ValueObjective
from scalerl.config.schema import CriticConfig

LENGTHS = [5, 2, 7, 1, 4, 3]
PER_TOKEN = ("new", "values", "returns", "response_mask")
CLIP_RANGE = 0.5

Rows = list[dict[str, torch.Tensor]]


def config_of(mode: str, cliprange_value: float = CLIP_RANGE) -> CriticConfig:
    return CriticConfig(loss_agg_mode=mode, loss_scale_factor=8.0, cliprange_value=cliprange_value)


def sequences(seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, length in enumerate(LENGTHS):
        row = {name: torch.randn(length, generator=generator, dtype=torch.float64) for name in PER_TOKEN}
        # The last sequence has no token to learn from.
        row["response_mask"] = (torch.rand(length, generator=generator) < 0.7) & (number < len(LENGTHS) - 1)
        row["response_mask"][0] |= number == 0
        rows.append(row)
    return rows


def packed(rows: Rows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    columns = {name: torch.cat([row[name] for row in rows]) for name in PER_TOKEN}
    lengths = torch.tensor([len(row["new"]) for row in rows])
    columns["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    return columns.pop("new"), columns


def counts(rows: Rows) -> tuple[int, int]:
    masks = [row["response_mask"] for row in rows]
    return sum(int(mask.sum()) for mask in masks), sum(bool(mask.any()) for mask in masks)


def run(objective: ValueObjective, parts: list[Rows]):
    """Sums over micro-batches: (loss, metrics, gradient of each sequence's values, by sequence)."""
    total, metrics, gradients = 0.0, {}, {}
    for rows in parts:
        values_T, columns = packed(rows)
        values_T.requires_grad_()
        loss, part_metrics = objective(values_T, columns)
        loss.backward()
        total += loss.item()
        for name, value in part_metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value.item()
        pieces = values_T.grad.split(columns["cu_seqlens"].diff().tolist())
        gradients |= zip([id(row["new"]) for row in rows], pieces, strict=True)
    return total, metrics, gradients


def token_loss(v: float, old: float, target: float) -> tuple[float, float, bool]:
    """(loss, its derivative by v, whether the clipped term is the larger), case by case."""
    if abs(v - old) <= CLIP_RANGE:
        return 0.5 * (v - target) ** 2, v - target, False
    edge = old + math.copysign(CLIP_RANGE, v - old)
    if abs(edge - target) > abs(v - target):
        # It has moved towards the return by more than the range: nothing pulls it further.
        return 0.5 * (edge - target) ** 2, 0.0, True
    return 0.5 * (v - target) ** 2, v - target, False


def by_hand(rows: Rows, mode: str):
    num_tokens, num_sequences = counts(rows)
    loss, clipped, predicted, gradients = 0.0, 0, 0.0, []
    for row in rows:
        mask = row["response_mask"].tolist()
        weight = {
            "token-mean": 1 / num_tokens,
            "token-sum": 1.0,
            "seq-mean-token-sum-norm": 1 / num_sequences / 8.0,
            "seq-mean-token-sum": 1 / num_sequences,
            "seq-mean-token-mean": 1 / (num_sequences * max(sum(mask), 1)),
        }[mode]
        gradient = []
        for v, old, target, keep in zip(*(row[name].tolist() for name in PER_TOKEN), strict=True):
            value, slope, is_clipped = token_loss(v, old, target) if keep else (0.0, 0.0, False)
            loss, clipped, predicted = loss + weight * value, clipped + is_clipped, predicted + (v if keep else 0.0)
            gradient.append(weight * slope)
        gradients.append(gradient)
    means = {"critic/vf_clipfrac": clipped / num_tokens, "critic/vpred_mean": predicted / num_tokens}
    return loss, {"critic/vf_loss": loss} | means, gradients


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(max_examples=25)
@given(seed=st.integers(0, 999))
def test_loss_gradient_and_metrics_are_those_of_each_token(mode, seed):
    rows = sequences(seed)
    want_loss, want_metrics, want_gradients = by_hand(rows, mode)
    loss, metrics, gradients = run(ValueObjective(config_of(mode), *counts(rows)), [rows])
    # Weights are float32.
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert metrics == pytest.approx(want_metrics, rel=1e-6, abs=1e-7)
    for row, want in zip(rows, want_gradients, strict=True):
        assert gradients[id(row["new"])].tolist() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 99),
    part_of=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    order=st.permutations(range(6)),
)
def test_loss_metrics_and_gradient_do_not_depend_on_the_split(mode, seed, part_of, order):
    rows = sequences(seed)
    objective = ValueObjective(config_of(mode), *counts(rows))
    parts = [[rows[row] for row in order if part_of[row] == part] for part in sorted(set(part_of))]
    loss, metrics, gradients = run(objective, parts)
    whole_loss, whole_metrics, whole_gradients = run(objective, [rows])
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    assert metrics == pytest.approx(whole_metrics, rel=1e-6, abs=1e-7)
    assert all(torch.equal(gradients[key], whole_gradients[key]) for key in whole_gradients)


def test_by_hand():
    # Token 0 is masked; 1 stays in range; 2 overshoots towards its return; 3 runs away from it.
    values_T = torch.tensor([9.0, 1.25, 2.0, 2.0], requires_grad=True)
    columns = {
        "values": torch.tensor([0.0, 1.0, 0.0, 0.0]),
        "returns": torch.tensor([0.0, 2.25, 3.0, -1.0]),
        "response_mask": torch.tensor([0, 1, 1, 1]),
        "cu_seqlens": torch.tensor([0, 2, 4]),
    }
    loss, metrics = ValueObjective(config_of("token-mean"), num_loss_tokens=3, num_sequences=2)(values_T, columns)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (1.0 + 2.5**2 + 9.0) / 3)
    assert values_T.grad.tolist() == pytest.approx([0.0, -1.0 / 3, 0.0, 3.0 / 3])
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {"critic/vf_loss": loss.item(), "critic/vf_clipfrac": 1 / 3, "critic/vpred_mean": 5.25 / 3}
    )


@pytest.mark.parametrize("cliprange_value", [CLIP_RANGE, math.inf])
def test_unchanged_values_learn_from_the_whole_error(cliprange_value):
    # The first update of a step: clipping has no say.
    rows = sequences(3)
    for row in rows:
        row["values"] = row["new"].clone()
    loss, metrics, gradients = run(ValueObjective(config_of("token-mean", cliprange_value), *counts(rows)), [rows])
    values = [row["new"].clone().requires_grad_() for row in rows]
    errors = [(v - row["returns"])[row["response_mask"]] for v, row in zip(values, rows, strict=True)]
    want = 0.5 * torch.cat(errors).square().mean()
    want.backward()
    assert loss == pytest.approx(want.item(), rel=1e-6)
    assert metrics["critic/vf_clipfrac"] == 0.0
    for row, v in zip(rows, values, strict=True):
        torch.testing.assert_close(gradients[id(row["new"])], v.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1e15, -1e15])
def test_extreme_values_stay_finite(scale):
    values_T, columns = packed(sequences(2))
    values_T = (values_T * scale).float().requires_grad_()
    columns |= {name: (columns[name] * scale).float() for name in ("values", "returns")}
    loss, metrics = ValueObjective(config_of("token-mean"), *counts(sequences(2)))(values_T, columns)
    loss.backward()
    assert values_T.grad.isfinite().all()
    assert all(value.isfinite() for value in (loss, *metrics.values()))


def test_metrics_alias_no_input_and_no_loss():
    values_T, columns = packed(sequences(3))
    before = {name: column.clone() for name, column in columns.items()}
    loss, metrics = ValueObjective(config_of("token-mean"), *counts(sequences(3)))(values_T.requires_grad_(), columns)
    assert all(torch.equal(before[name], column) for name, column in columns.items())
    assert not any(value.requires_grad for value in metrics.values())
    assert all(value.ndim == 0 for value in metrics.values())
    snapshot = {name: value.item() for name, value in metrics.items()}
    with torch.no_grad():
        for tensor in (loss, values_T, *columns.values()):
            tensor.zero_()
    assert {name: value.item() for name, value in metrics.items()} == snapshot


def test_token_columns_are_what_it_reads():
    values_T, columns = packed(sequences(0))
    objective = ValueObjective(config_of("token-mean"), 5, 2)
    needed = {name: columns[name] for name in (*objective.token_columns, "cu_seqlens")}
    objective(values_T, needed)
    for name in needed:
        with pytest.raises(ValueError, match=rf"micro-batch lacks columns \['{name}'\]"):
            objective(values_T, {key: value for key, value in needed.items() if key != name})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of("nope"), r"critic\.loss_agg_mode='nope': no such mode"),
        (config_of("token-mean", 0.0), r"critic\.cliprange_value=0\.0 must be over 0"),
        (config_of("token-mean", -1.0), r"critic\.cliprange_value=-1\.0"),
        (config_of("token-mean", math.nan), r"critic\.cliprange_value=nan"),
    ],
)
def test_refuses_configurations_before_the_first_forward(config, message):
    with pytest.raises(ValueError, match=message):
        ValueObjective(config, 1, 1)


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0)])
def test_refuses_a_mini_batch_without_loss_tokens(numbers):
    with pytest.raises(ValueError, match="has no token to learn from"):
        ValueObjective(config_of("token-mean"), *numbers)
