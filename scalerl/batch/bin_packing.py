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
    """A number of bins that every packing needs at least.

    The largest of total size / cap and, for every j, (number of items over cap / (j + 1)) / j: at most j of those
    items share a bin.
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
    """First-fit-decreasing packing: items by decreasing size, each into the first bin with room, or a new one."""
    return _fit_decreasing(np.asarray(sizes), cap, lambda room, index: index)


def best_fit_decreasing(sizes: Sequence[int] | np.ndarray, cap: int) -> Bins:
    """Best-fit-decreasing packing: items by decreasing size, each into the fullest bin with room, or a new one."""
    return _fit_decreasing(np.asarray(sizes), cap, lambda room, index: (room, index))


def _fit_decreasing(sizes: np.ndarray, cap: int, order: Callable[[int, int], Any]) -> Bins:
    """Packs items by decreasing size, each into the bin with room whose order(room, index) is smallest."""
    bins: Bins = []
    rooms: list[int] = []
    # ready: bins with room for the current item. The others are parked, roomiest first, until an item is small enough.
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
    """Packs items by decreasing workload, each into the least loaded bin with room (LPT); None if an item fits none."""
    items = np.argsort(-workload, kind="stable")
    # In this order too: a step's numbers are more than a cache holds, and are read one after the other.
    return least_loaded_in_order(items.tolist(), sizes[items].tolist(), workload[items].tolist(), num_bins, cap)


def least_loaded_in_order(
    items: Sequence[int], sizes: Sequence[int], workload: Sequence[float], num_bins: int, cap: float
) -> Bins | None:
    """Packs these items as `least_loaded`, in the given order.  sizes[i], workload[i]: of items[i]."""
    bins: Bins = [[] for _ in range(num_bins)]
    room = [cap] * num_bins
    heap = [(0.0, index) for index in range(num_bins)]
    # Bins too full for an item wait here, roomiest first, until an item may fit.
    parked: list[tuple[float, float, int]] = []
    for item, size, work in zip(items, sizes, workload, strict=True):
        while parked and -parked[0][0] >= size:
            _, load, index = heapq.heappop(parked)
            heapq.heappush(heap, (load, index))
        while heap and room[heap[0][1]] < size:
            load, index = heapq.heappop(heap)
            heapq.heappush(parked, (-room[index], load, index))
        if not heap:
            return None
        load, index = heap[0]
        heapq.heapreplace(heap, (load + work, index))
        bins[index].append(item)
        room[index] -= size
    return bins


def split_to(bins: Bins, workload: np.ndarray, num_bins: int) -> Bins:
    """Splits bins until there are exactly num_bins, none empty: each time it halves the heaviest with several items.

    Part of a bin is within the cap if the bin was. Needs len(bins) <= num_bins <= number of items.
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
        for half in (index, len(bins) - 1):
            if len(bins[half]) > 1:
                heapq.heappush(heap, (-float(workload[bins[half]].sum()), half))
    return bins


def pack_bins(sizes: np.ndarray, workload: np.ndarray, num_bins: int, cap: int) -> Bins | None:
    """Packs items into exactly num_bins bins of similar workload, none empty or over cap; None if it finds no packing.

    num_bins must not exceed the number of items.
    """
    bins = least_loaded(sizes, workload, num_bins, cap)
    if bins is None:
        bins = best_fit_decreasing(sizes, cap)
    return split_to(bins, workload, num_bins) if len(bins) <= num_bins else None


def fewest_bins(
    sizes: np.ndarray, cap: int, step: int, attempt: Callable[[int], T | None]
) -> tuple[T | None, Bins, int]:
    """Finds a packing with as few bins as it can, their number a multiple of `step`.

    attempt(num_bins): returns a balanced packing, or None. It is tried at the lower bound; if that fails, downwards
    from the number that the decreasing heuristics need.
    Returns (attempt's packing or None, the heuristics' bins or [] when they were not needed, number of bins).
    The number never exceeds first-fit-decreasing's rounded up to `step`, but may exceed the number of items.
    """
    lowest = round_up(lower_bound(sizes, cap), step)
    packing = attempt(lowest)
    if packing is not None:
        return packing, [], lowest
    bins = best_fit_decreasing(sizes, cap)
    if round_up(len(bins), step) > lowest:
        bins = min(first_fit_decreasing(sizes, cap), bins, key=len)
    count = round_up(len(bins), step)
    if count == lowest:
        return None, bins, count
    while count - step > lowest and (fewer := attempt(count - step)) is not None:
        packing, count = fewer, count - step
    return (attempt(count) if packing is None else packing), bins, count


def round_up(value: int, step: int) -> int:
    """The smallest multiple of step that is not below value."""
    return -(-value // step) * step


def group_evenly(loads: np.ndarray, num_groups: int) -> Bins:
    """Deals items into num_groups groups of equal count: by decreasing load, into the lightest group that has room."""
    per_group = len(loads) // num_groups
    groups: Bins = [[] for _ in range(num_groups)]
    heap = [(0.0, index) for index in range(num_groups)]
    for item in np.argsort(-loads, kind="stable").tolist():
        load, index = heapq.heappop(heap)
        groups[index].append(item)
        if len(groups[index]) < per_group:
            heapq.heappush(heap, (load + float(loads[item]), index))
    return groups
