"""Bin packing: bounds, the cap, and known optima."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl.batch.bin_packing import (
    best_fit_decreasing,
    fewest_bins,
    first_fit_decreasing,
    group_evenly,
    least_loaded,
    lower_bound,
    pack_bins,
    split_to,
)

CAP = 20
sizes_lists = st.lists(st.integers(0, CAP), min_size=1, max_size=30)
packers = pytest.mark.parametrize("packer", [first_fit_decreasing, best_fit_decreasing])


def first_fit_by_hand(sizes: list[int], cap: int) -> int:
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        for index, room in enumerate(rooms):
            if room >= size:
                rooms[index] -= size
                break
        else:
            rooms.append(cap - size)
    return len(rooms)


def optimum(sizes: list[int], cap: int) -> int:
    """Fewest bins, by trying every assignment."""

    def best(remaining: tuple[int, ...], rooms: tuple[int, ...]) -> int:
        if not remaining:
            return len(rooms)
        size, rest = remaining[0], remaining[1:]
        choices = {
            tuple(sorted((*rooms[:i], room - size, *rooms[i + 1 :]))) for i, room in enumerate(rooms) if room >= size
        }
        return min(best(rest, choice) for choice in choices | {(*rooms, cap - size)})

    return best(tuple(sizes), ())


def assert_packing(bins: list[list[int]], sizes: np.ndarray, cap: int) -> None:
    assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
    assert all(sizes[items].sum() <= cap for items in bins)


@packers
@given(sizes_lists)
def test_decreasing_heuristics_pack_everything_under_the_cap(packer, sizes):
    sizes = np.array(sizes)
    bins = packer(sizes, CAP)
    assert_packing(bins, sizes, CAP)
    assert all(bins)


@given(sizes_lists)
def test_first_fit_needs_as_many_bins_as_the_textbook(sizes):
    assert len(first_fit_decreasing(sizes, CAP)) == first_fit_by_hand(sizes, CAP)


def fit_by_hand(sizes: list[int], cap: int, fullest: bool) -> list[list[int]]:
    bins: list[list[int]] = []
    rooms: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fitting = [index for index, room in enumerate(rooms) if room >= sizes[item]]
        if fitting:
            index = min(fitting, key=lambda b: rooms[b]) if fullest else fitting[0]
        else:
            index = len(bins)
            bins.append([])
            rooms.append(cap)
        bins[index].append(item)
        rooms[index] -= sizes[item]
    return bins


@given(sizes_lists)
def test_decreasing_heuristics_follow_their_rule(sizes):
    assert first_fit_decreasing(np.array(sizes), CAP) == fit_by_hand(sizes, CAP, fullest=False)
    assert best_fit_decreasing(np.array(sizes), CAP) == fit_by_hand(sizes, CAP, fullest=True)


@given(st.lists(st.integers(0, CAP), min_size=1, max_size=6))
def test_lower_bound_is_never_over_the_optimum(sizes):
    assert lower_bound(np.array(sizes), CAP) <= optimum(sizes, CAP)


# [11] * 5 and [7] * 8 need more bins than their total over the cap (3 each).
@pytest.mark.parametrize(
    ("sizes", "want"),
    [([7] * 8, 4), ([11] * 5, 5), ([20, 1], 2), ([6, 6, 6, 6], 2), ([1] * 20, 1), ([0] * 25, 1), ([5] * 9, 3)],
)
def test_lower_bound_table(sizes, want):
    assert lower_bound(np.array(sizes), CAP) == want


@given(sizes_lists, st.integers(1, 30), st.integers(0, 99))
def test_least_loaded_is_under_the_cap_or_none(sizes, num_bins, seed):
    sizes = np.array(sizes)
    workload = np.random.default_rng(seed).random(len(sizes)) + 0.01
    bins = least_loaded(sizes, workload, num_bins, CAP)
    if bins is None:
        # The greedy rule got stuck: with one bin for each item it cannot.
        assert num_bins < len(sizes)
        return
    assert len(bins) == num_bins
    assert_packing(bins, sizes, CAP)


def least_loaded_by_hand(sizes: np.ndarray, workload: np.ndarray, num_bins: int, cap: int) -> list[list[int]] | None:
    bins, loads, rooms = [[] for _ in range(num_bins)], [0.0] * num_bins, [cap] * num_bins
    for item in sorted(range(len(sizes)), key=lambda i: (-workload[i], i)):
        fitting = [index for index in range(num_bins) if rooms[index] >= sizes[item]]
        if not fitting:
            return None
        index = min(fitting, key=lambda b: (loads[b], b))
        bins[index].append(item)
        loads[index] += workload[item]
        rooms[index] -= sizes[item]
    return bins


@given(st.lists(st.integers(2, 12), min_size=12, max_size=40), st.integers(-2, 2), st.integers(0, 99))
def test_least_loaded_follows_its_rule(sizes, spare_bins, seed):
    # About as many bins as needed, so that bins fill up and small items come to them later.
    num_bins = max(1, sum(sizes) // CAP + spare_bins)
    sizes = np.array(sizes)
    # Integer workloads that order the items unlike their sizes do.
    workload = np.random.default_rng(seed).integers(1, 9, len(sizes)).astype(float)
    assert least_loaded(sizes, workload, num_bins, CAP) == least_loaded_by_hand(sizes, workload, num_bins, CAP)


@given(sizes_lists, st.data())
def test_split_fills_every_bin(sizes, data):
    sizes = np.array(sizes)
    bins = first_fit_decreasing(sizes, CAP)
    count = data.draw(st.integers(len(bins), len(sizes)))
    split = split_to(bins, sizes.astype(float), count)
    assert_packing(split, sizes, CAP)
    assert len(split) == count
    assert all(split)


@given(sizes_lists, st.data())
def test_pack_gives_exactly_the_bins_asked_for(sizes, data):
    sizes = np.array(sizes)
    count = data.draw(st.integers(1, len(sizes)))
    bins = pack_bins(sizes, sizes.astype(float), count, CAP)
    if bins is None:
        assert count < first_fit_by_hand(sizes.tolist(), CAP)
        return
    assert_packing(bins, sizes, CAP)
    assert len(bins) == count
    assert all(bins)


@given(sizes_lists, st.integers(1, 4))
def test_fewest_bins_is_between_the_bounds(sizes, step):
    sizes = np.array(sizes)
    asked = []

    def attempt(count: int):
        asked.append(count)
        return least_loaded(sizes, sizes, count, CAP)

    balanced, bins, count = fewest_bins(sizes, CAP, step, attempt)
    assert count % step == 0
    assert lower_bound(sizes, CAP) <= count < first_fit_by_hand(sizes.tolist(), CAP) + step
    if balanced is None:
        assert_packing(bins, sizes, CAP)
        assert len(bins) <= count
    else:
        assert_packing(balanced, sizes, CAP)
        assert len(balanced) == count
    # Fewer were tried, and failed, unless no packing can exist.
    assert count - step < lower_bound(sizes, CAP) or count - step in asked


def test_fewest_bins_falls_back_on_first_fit_where_balancing_gets_stuck():
    # 13 7 | 9 6 5 fills two bins; least loaded first puts 7 on 9 and has no room for 5.
    sizes = np.array([13, 9, 7, 6, 5])
    balanced, bins, count = fewest_bins(sizes, CAP, 1, lambda count: least_loaded(sizes, sizes, count, CAP))
    assert (balanced, count) == (None, 2)
    assert sorted(sorted(sizes[items].tolist()) for items in bins) == [[5, 6, 9], [7, 13]]


def test_fewest_bins_goes_below_the_decreasing_heuristics():
    # Lower bound 4, first fit 6: 5 is asked for, and taken when somebody can do it.
    sizes = np.array([14, 13, 13, 12, 10, 9, 9])
    assert (lower_bound(sizes, CAP), first_fit_by_hand(sizes.tolist(), CAP)) == (4, 6)
    balanced, _, count = fewest_bins(sizes, CAP, 1, lambda count: "packed" if count == 5 else None)
    assert (balanced, count) == ("packed", 5)


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=8), st.integers(1, 4))
def test_groups_have_equal_counts(loads, num_groups):
    loads = np.array(loads * num_groups)
    groups = group_evenly(loads, num_groups)
    assert {len(group) for group in groups} == {len(loads) // num_groups}
    assert sorted(item for group in groups for item in group) == list(range(len(loads)))
