"""Local search that evens out the workload of data-parallel ranks without breaking a packing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from scalerl.balance.bin_packing import bin_sums

# Stop when the heaviest rank is this close to the mean; a step then waits for it less than its own noise.
_TARGET_IMBALANCE = 0.002
_MAX_EXCHANGES = 64
# Groups of one rank that are looked at in one exchange; more only matters where balance is easy anyway.
_MAX_GROUPS = 400


def even_out(ranks: list[list[list[int]]], sizes: np.ndarray, workload: np.ndarray, cap: int) -> None:
    """Exchanges items between the heaviest rank and lighter ones while that evens out their workload. In place.

    ranks[rank][bin] = items. Keeps the number of bins, leaves none empty, keeps every bin within cap.
    """
    loads = np.array([bin_sums(bins, workload).sum() for bins in ranks])
    for _ in range(_MAX_EXCHANGES):
        heavy = int(loads.argmax())
        if loads[heavy] <= loads.mean() * (1 + _TARGET_IMBALANCE):
            return
        for light in np.argsort(loads, kind="stable")[:-1].tolist():
            brought = _exchange(ranks[heavy], ranks[light], sizes, workload, cap, loads[heavy] - loads[light])
            if brought is not None:
                loads[heavy] -= brought
                loads[light] += brought
                break
        else:
            return


@dataclass(frozen=True)
class _Groups:
    """Items that leave a bin together; items[g] = () is the place in a bin for what comes without return.

    bins, sizes, work: [G] bin, size and workload of each group.  fills: [G] whether it is all that its bin holds.
    room: [bins].
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
    """Does the exchange that brings closest to half the gap across; the workload brought, None if none helps."""
    from_h, from_l = _groups(heavy, sizes, workload, cap), _groups(light, sizes, workload, cap, with_nothing=True)
    brought = from_h.work[:, None] - from_l.work[None]
    grown_l = from_h.sizes[:, None] - from_l.sizes[None]
    allowed = (grown_l <= from_l.room[from_l.bins]) & (-grown_l <= from_h.room[from_h.bins, None])
    comes_back = np.array([bool(items) for items in from_l.items])
    allowed &= (comes_back | ~from_h.fills[:, None]) & (brought > 0) & (brought < gap)
    if not allowed.any():
        return None
    error = np.where(allowed, np.abs(brought - gap / 2), np.inf)
    h, k = np.unravel_index(int(error.argmin()), error.shape)
    bin_h, bin_l = heavy[from_h.bins[h]], light[from_l.bins[k]]
    bin_h[:] = [item for item in bin_h if item not in from_h.items[h]] + list(from_l.items[k])
    bin_l[:] = [item for item in bin_l if item not in from_l.items[k]] + list(from_h.items[h])
    return float(brought[h, k])


def _groups(
    bins: list[list[int]], sizes: np.ndarray, workload: np.ndarray, cap: int, with_nothing: bool = False
) -> _Groups:
    """Single items, whole bins, and, while there are few, pairs of a bin: two shorter samples for one longer have as
    many tokens and less attention, which is what evens out ranks whose bins are full."""
    found = [(at, (item,)) for at, items in enumerate(bins) for item in items]
    found = _evenly(found + [(at, tuple(items)) for at, items in enumerate(bins) if len(items) > 1])
    if len(found) + sum(len(items) * (len(items) - 1) // 2 for items in bins) <= _MAX_GROUPS:
        found += [(at, pair) for at, items in enumerate(bins) if len(items) > 2 for pair in combinations(items, 2)]
    room = cap - bin_sums(bins, sizes)
    if with_nothing:
        found.append((int(room.argmax()), ()))
    members = [list(items) for _, items in found]
    return _Groups(
        items=[items for _, items in found],
        bins=np.array([at for at, _ in found]),
        sizes=np.array([int(sizes[items].sum()) for items in members]),
        work=np.array([float(workload[items].sum()) for items in members]),
        fills=np.array([len(items) == len(bins[at]) for at, items in found]),
        room=room,
    )


def _evenly(found: list) -> list:
    """All, or _MAX_GROUPS of them evenly spaced."""
    return [found[at] for at in np.linspace(0, len(found) - 1, min(len(found), _MAX_GROUPS)).astype(int).tolist()]
