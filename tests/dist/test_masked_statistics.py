"""Masked statistics over a group of ranks equal those of all elements in one place."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from scalerl.algorithms import masked_mean, masked_var, whiten_selected
from tests.dist.launch import run_ranks

# Elements per rank, and how many of them the mask selects.
SHARES = {
    "two": ((7, 5), (11, 4)),
    "one has none": ((9, 6), (4, 0)),
    "one element": ((3, 1), (2, 0)),
    "none": ((3, 0), (2, 0)),
}


def case(shares: tuple[tuple[int, int], ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Means far apart: a rank's own statistics are not the group's. Masked elements are NaN."""
    generator = torch.Generator().manual_seed(0)
    values, masks = [], []
    for rank, (size, selected) in enumerate(shares):
        mask = torch.arange(size) < selected
        noise = torch.randn(size, generator=generator, dtype=torch.float64)
        values.append(torch.where(mask, noise + 10 * rank, math.nan))
        masks.append(mask)
    return values, masks


def on_rank(shares: tuple[tuple[int, int], ...]) -> dict[str, Tensor]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    group = dist.group.WORLD
    values, masks = case(shares)
    mine, mask = values[dist.get_rank()].requires_grad_(), masks[dist.get_rank()]
    statistics = {
        "mean": masked_mean(mine, mask, group=group),
        "var": masked_var(mine, mask, group=group),
        "biased": masked_var(mine, mask, unbiased=False, group=group),
        "whiten": whiten_selected(mine, mask, group=group),
    }
    for name in ("mean", "var"):
        statistics[f"{name} gradient"] = torch.autograd.grad(statistics[name], mine)[0]
    pairs = torch.stack([torch.nan_to_num(mine.detach())[:2], torch.tensor([1.0, 2.0], dtype=torch.float64)])
    statistics["axis"] = masked_mean(pairs, torch.ones(2, 2), axis=0, group=group)
    return {name: tensor.detach() for name, tensor in statistics.items()}


@pytest.mark.parametrize("name", SHARES)
def test_equals_one_place(name: str) -> None:
    values, masks = case(SHARES[name])
    whole, mask = torch.cat(values).requires_grad_(), torch.cat(masks)
    sizes = [len(part) for part in values]
    expected = {
        "mean": masked_mean(whole, mask),
        "var": masked_var(whole, mask),
        "biased": masked_var(whole, mask, unbiased=False),
    }
    split = {
        "whiten": whiten_selected(whole, mask).detach().split(sizes),
    }
    for statistic in ("mean", "var"):
        split[f"{statistic} gradient"] = torch.autograd.grad(expected[statistic], whole)[0].split(sizes)
    ranks = run_ranks(2, on_rank, SHARES[name])
    axis = torch.stack([torch.nan_to_num(part)[:2] for part in values]).sum(0) + torch.tensor([2.0, 4.0])
    for rank, statistics in enumerate(ranks):
        for statistic, value in expected.items():
            torch.testing.assert_close(statistics[statistic], value.detach(), rtol=1e-12, atol=1e-12)
            assert torch.equal(statistics[statistic], ranks[0][statistic])
        for statistic, parts in split.items():
            torch.testing.assert_close(statistics[statistic], parts[rank], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(statistics["axis"], axis / 4, rtol=1e-12, atol=1e-12)


def test_a_rank_alone_would_differ() -> None:
    """Else the test above could not fail."""
    values, masks = case(SHARES["two"])
    alone = [float(masked_mean(*pair)) for pair in zip(values, masks, strict=True)]
    assert abs(alone[0] - alone[1]) > 5
