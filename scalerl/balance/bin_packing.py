"""Bin packing under a hard cap: items of given sizes into bins, balanced by workload.

Every function is deterministic: ties go to the lower item or bin number.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np

Bins = list[list[int]]
T = TypeVar("T")


def lower_bound(sizes: np.ndarray, cap: int) -> int:
    """A number of bins that no packing can go below.

    The largest of: total size / cap; for every j, (items over cap / (j + 1)) / j, as at most j of those share a bin.
    """
    largest_first = np.sort(sizes[sizes > 0])[::-1]
    by_count = -(-np.arange(1, len(largest_first) + 1) // (cap // largest_first))
    return max(1, -(-int(sizes.sum()) // cap), int(by_count.max(initial=1)))


def bin_sums(bins: Sequence[Sequence[int]], values: np.ndarray) -> np.ndarray:
    """[bins] sum of the items' values in each bin; no bin may be empty."""
    counts = np.fromiter(map(len, bins), dtype=np.int64, count=len(bins))
    items = np.fromiter(chain.from_iterable(bins), dtype=np.int64, count=int(counts.sum()))
    return np.add.reduceat(values[items], np.cumsum(counts) - counts)


def first_fit_decreasing(sizes: Sequence[int] | np.ndarray, cap: int) -> Bins:
    """Items by decreasing size, each into the first bin with room; a new bin when there is none."""
    return _fit_decreasing(np.asarray(sizes), cap, lambda room, index: index)


def best_fit_decreasing(sizes: Sequence[int] | np.ndarray, cap: int) -> Bins:
    """Items by decreasing size, each into the fullest bin with room (the first of those); a new bin if none has."""
    return _fit_decreasing(np.asarray(sizes), cap, lambda room, index: (room, index))


def _fit_decreasing(sizes: np.ndarray, cap: int, order: Callable[[int, int], Any]) -> Bins:
    """Items by decreasing size, each into the bin with room that comes first by order(room, index)."""
    bins: Bins = []
    rooms: list[int] = []
    # Bins with room for the item at hand. The others are parked, roomiest first: as items get smaller, they come back.
    ready: list[tuple[Any, int]] = []
    parked: list[tuple[int, int]] = []
    values = sizes.tolist()
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = values[item]
        while parked and -parked[0][0] >= size:
            room, index = heapq.heappop(parked)
            heapq.heappush(ready, (order(-room, index), index))
        if ready:
            index = ready[0][1]
            bins[index].append(item)
        else:
            index = len(bins)
            bins.append([item])
            rooms.append(cap)
            ready.append((order(cap, index), index))
        room = rooms[index] = rooms[index] - size
        if room >= size:
            heapq.heapreplace(ready, (order(room, index), index))
        else:
            heapq.heappop(ready)
            heapq.heappush(parked, (-room, index))
    return bins


def least_loaded(sizes: np.ndarray, workload: np.ndarray, num_bins: int, cap: float) -> Bins | None:
    """Items by decreasing workload, each into the bin of least workload that has room (LPT); None when one has none."""
    bins: Bins = [[] for _ in range(num_bins)]
    room = [cap] * num_bins
    heap = [(0.0, index) for index in range(num_bins)]
    # Bins too full for an item wait here, roomiest first, until an item comes that may fit.
    parked: list[tuple[float, float, int]] = []
    size_of, work_of = sizes.tolist(), workload.tolist()
    for item in np.argsort(-workload, kind="stable").tolist():
        size = size_of[item]
        while parked and -parked[0][0] >= size:
            _, load, index = heapq.heappop(parked)
            heapq.heappush(heap, (load, index))
        while heap and room[heap[0][1]] < size:
            load, index = heapq.heappop(heap)
            heapq.heappush(parked, (-room[index], load, index))
        if not heap:
            return None
        load, index = heap[0]
        heapq.heapreplace(heap, (load + work_of[item], index))
        bins[index].append(item)
        room[index] -= size
    return bins


def split_to(bins: Bins, workload: np.ndarray, num_bins: int) -> Bins:
    """The same items in exactly num_bins bins, none empty: the heaviest bin of two or more items is halved until then.

    A part of a bin fits where the bin fitted. Needs len(bins) <= num_bins <= number of items.
    """
    bins = [items for items in bins if items]
    if len(bins) == num_bins:
        return bins
    loads = bin_sums(bins, workload).tolist()
    heap = [(-load, index) for index, load in enumerate(loads) if len(bins[index]) > 1]
    heapq.heapify(heap)
    while len(bins) < num_bins:
        _, index = heapq.heappop(heap)
        items = bins[index]
        halves = least_loaded(np.zeros(len(items)), np.maximum(workload[items], 1e-30), 2, np.inf)
        # Two items or more fit into two bins without a limit.
        assert halves is not None
        bins[index], new = ([items[i] for i in half] for half in halves)
        bins.append(new)
        for at in (index, len(bins) - 1):
            if len(bins[at]) > 1:
                heapq.heappush(heap, (-float(workload[bins[at]].sum()), at))
    return bins


def pack(sizes: np.ndarray, workload: np.ndarray, num_bins: int, cap: int) -> Bins | None:
    """Exactly num_bins bins, none empty, none over cap, with similar workload; None when no packing is found.

    num_bins must not exceed the number of items.
    """
    bins = least_loaded(sizes, workload, num_bins, cap)
    if bins is None:
        bins = best_fit_decreasing(sizes, cap)
    return split_to(bins, workload, num_bins) if len(bins) <= num_bins else None


def fewest_bins(
    sizes: np.ndarray, cap: int, step: int, attempt: Callable[[int], T | None]
) -> tuple[T | None, Bins, int]:
    """The smallest multiple of `step` bins for which a packing is found.

    attempt(num_bins): a balanced packing, or None. It is asked for the lower bound; failing that, downwards from the
    number that the decreasing heuristics need.
    Returns (what attempt gave or None, the heuristics' bins or [] when they were not needed, number of bins).
    The number never exceeds first-fit-decreasing's rounded up to `step`, but may exceed the number of items.
    """
    lowest = round_up(lower_bound(sizes, cap), step)
    found = attempt(lowest)
    if found is not None:
        return found, [], lowest
    bins = best_fit_decreasing(sizes, cap)
    if round_up(len(bins), step) > lowest:
        bins = min(first_fit_decreasing(sizes, cap), bins, key=len)
    count = round_up(len(bins), step)
    if count == lowest:
        return None, bins, count
    while count - step > lowest and (fewer := attempt(count - step)) is not None:
        found, count = fewer, count - step
    return (attempt(count) if found is None else found), bins, count


def round_up(value: int, step: int) -> int:
    """The smallest multiple of step that is not below value."""
    return -(-value // step) * step


def group_evenly(loads: np.ndarray, num_groups: int) -> Bins:
    """Items into num_groups groups of equal count, by decreasing load into the lightest group that is not full."""
    per_group = len(loads) // num_groups
    groups: Bins = [[] for _ in range(num_groups)]
    heap = [(0.0, index) for index in range(num_groups)]
    for item in np.argsort(-loads, kind="stable").tolist():
        load, index = heapq.heappop(heap)
        groups[index].append(item)
        if len(groups[index]) < per_group:
            heapq.heappush(heap, (load + float(loads[item]), index))
    return groups
