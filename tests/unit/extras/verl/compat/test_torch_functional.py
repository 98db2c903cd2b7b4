"""Helpers on logits and padded batches: against log_softmax and numpy; a schedule against its formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from scalerl.extras.verl.compat.torch_functional import (
    get_constant_schedule_with_warmup,
    logprobs_from_logits,
    masked_mean,
    masked_whiten,
)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_moves_what_the_mask_leaves_out_too(shift_mean):
    values = np.random.default_rng(0).normal(3, 2, (4, 6))
    mask = np.arange(24).reshape(4, 6) % 3 != 0
    got = masked_whiten(torch.from_numpy(values), torch.from_numpy(mask), shift_mean)
    mean, var = values[mask].mean(), values[mask].var(ddof=1)
    want = (values - mean) / np.sqrt(var + 1e-8) + (0.0 if shift_mean else mean)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12)
    assert (got[~torch.from_numpy(mask)] != 0).all()


def test_whiten_takes_statistics_of_the_mask_alone_and_its_mean_is_zero():
    values, mask = torch.tensor([1.0, math.nan, 3.0, 1e9]), torch.tensor([1, 0, 1, 0])
    got = masked_whiten(values, mask)
    torch.testing.assert_close(got[mask != 0], torch.tensor([-(0.5**0.5), 0.5**0.5]))
    assert masked_mean(got, mask).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("num_warmup_steps", "want"),
    [(4, [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]), (1, [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]), (0, [1.0] * 6)],
)
def test_constant_schedule_with_warmup(num_warmup_steps, want):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedule = get_constant_schedule_with_warmup(optimizer, num_warmup_steps)
    assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
    learning_rates = []
    for _ in want:
        learning_rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert learning_rates == pytest.approx([0.5 * share for share in want])


def test_a_schedule_goes_on_where_it_was():
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "initial_lr": 0.5}], lr=0.1)
    get_constant_schedule_with_warmup(optimizer, 8, last_epoch=5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 6 / 8)


def logits_and_labels(shape: tuple[int, ...], vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(*shape, vocab_size, generator=generator, dtype=torch.float64) * 5).to(dtype)
    return logits, torch.randint(vocab_size, shape, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,)])
def test_logprobs_equal_log_softmax(dtype, shape):
    logits, labels = logits_and_labels(shape, 11, dtype)
    got = logprobs_from_logits(logits, labels)
    want = logits.double().log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_gradient_equals_autograd_of_log_softmax():
    leaf, labels = logits_and_labels((4, 3), 7, torch.float64)
    grad = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    leaf.requires_grad_()
    leaf.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1).backward(grad)
    want, leaf.grad = leaf.grad, None
    logits = leaf * 1.0
    before = logits.detach().clone()
    logprobs_from_logits(logits, labels).backward(grad)
    torch.testing.assert_close(leaf.grad, want)
    assert torch.equal(logits.detach(), before)


def test_extreme_logits():
    logits = torch.tensor([[1e4, 0.0, -1e4], [-math.inf, 0.0, 0.0]])
    got = logprobs_from_logits(logits, torch.tensor([2, 1]))
    torch.testing.assert_close(got, torch.tensor([-2e4, -math.log(2)]))


def test_labels_must_match():
    with pytest.raises(ValueError, match=r"labels \(3,\).*logits \(2, 5\)"):
        logprobs_from_logits(torch.zeros(2, 5), torch.zeros(3, dtype=torch.int64))
