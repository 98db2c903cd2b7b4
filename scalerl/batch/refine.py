"""Local search that evens out the workload of data-parallel ranks without breaking a packing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from scalerl.batch.bin_packing import bin_sums

# Stop when the heaviest rank is this close to the mean; a step then waits for it less than its own noise.
_TARGET_IMBALANCE = 0.002
_MAX_EXCHANGES = 64
# Groups of one rank that an exchange considers; more would only matter where balance is easy anyway.
_MAX_GROUPS = 400


def even_out(ranks: list[list[list[int]]], sizes: np.ndarray, workload: np.ndarray, cap: int) -> None:
    """Exchanges items between the heaviest rank and lighter ones, in place, as long as that evens out their workload.

    ranks[rank][bin] = items. Keeps the number of bins, leaves none empty, keeps every bin within cap.
    """
    sums = bin_sums([bin_ for bins in ranks for bin_ in bins], workload)
    starts = np.cumsum([len(bins) for bins in ranks[:-1]])
    loads = np.array([rank_sums.sum() for rank_sums in np.split(sums, starts)])
    for _ in range(_MAX_EXCHANGES):
        heavy = int(loads.argmax())
        if loads[heavy] <= loads.mean() * (1 + _TARGET_IMBALANCE):
            return
        for light in np.argsort(loads, kind="stable")[:-1].tolist():
            moved = _exchange(ranks[heavy], ranks[light], sizes, workload, cap, loads[heavy] - loads[light])
            if moved is not None:
                loads[heavy] -= moved
                loads[light] += moved
                break
        else:
            return


@dataclass(frozen=True)
class _Groups:
    """Groups of items of one rank, each of which may leave its bin for a bin of another rank.

    items[g] = () stands for moving an item into bins[g] without giving one back.
    bins, sizes, work: [G] bin, size and workload of each group.  fills: [G] True if the group is all its bin holds.
    room: [bins] room left in each bin.
    """

    items: list[tuple[int, ...]]
    bins: np.ndarray
    sizes: np.ndarray
    work: np.ndarray
    fills: np.ndarray
    room: np.ndarray


def _exchange(
    heavy: list[list[int]], light: list[list[int]], sizes: np.ndarray, workload: np.ndarray, cap: int, gap: float
) -> float | None:
    """Does the exchange that moves closest to half the gap; returns the workload moved, None if no exchange helps."""
    from_h, from_l = _groups(heavy, sizes, workload, cap), _groups(light, sizes, workload, cap, with_nothing=True)
    moved = from_h.work[:, None] - from_l.work[None]
    grown_l = from_h.sizes[:, None] - from_l.sizes[None]
    allowed = (grown_l <= from_l.room[from_l.bins]) & (-grown_l <= from_h.room[from_h.bins, None])
    comes_back = np.array([bool(items) for items in from_l.items])
    allowed &= (comes_back | ~from_h.fills[:, None]) & (moved > 0) & (moved < gap)
    if not allowed.any():
        return None
    error = np.where(allowed, np.abs(moved - gap / 2), np.inf)
    h, k = np.unravel_index(int(error.argmin()), error.shape)
    bin_h, bin_l = heavy[from_h.bins[h]], light[from_l.bins[k]]
    bin_h[:] = [item for item in bin_h if item not in from_h.items[h]] + list(from_l.items[k])
    bin_l[:] = [item for item in bin_l if item not in from_l.items[k]] + list(from_h.items[h])
    return float(moved[h, k])


def _groups(
    bins: list[list[int]], sizes: np.ndarray, workload: np.ndarray, cap: int, with_nothing: bool = False
) -> _Groups:
    """Candidates for an exchange: single items, whole bins and, if there are few groups, pairs of items of a bin.

    Two shorter samples have as many tokens as a longer one but less attention, so that exchanging them evens out ranks
    whose bins are full.  with_nothing: adds the empty group, for moving an item without giving one back.
    """
    groups = [(bin_index, (item,)) for bin_index, items in enumerate(bins) for item in items]
    groups = _evenly(groups + [(bin_index, tuple(items)) for bin_index, items in enumerate(bins) if len(items) > 1])
    if len(groups) + sum(len(items) * (len(items) - 1) // 2 for items in bins) <= _MAX_GROUPS:
        groups += [
            (bin_index, pair)
            for bin_index, items in enumerate(bins)
            if len(items) > 2
            for pair in combinations(items, 2)
        ]
    room = cap - bin_sums(bins, sizes)
    if with_nothing:
        groups.append((int(room.argmax()), ()))
    members = [list(items) for _, items in groups]
    return _Groups(
        items=[items for _, items in groups],
        bins=np.array([bin_index for bin_index, _ in groups]),
        sizes=np.array([int(sizes[items].sum()) for items in members]),
        work=np.array([float(workload[items].sum()) for items in members]),
        fills=np.array([len(items) == len(bins[bin_index]) for bin_index, items in groups]),
        room=room,
    )


def _evenly(groups: list) -> list:
    """The groups, or _MAX_GROUPS of them evenly spaced if there are more."""
    return [groups[i] for i in np.linspace(0, len(groups) - 1, min(len(groups), _MAX_GROUPS)).astype(int).tolist()]
