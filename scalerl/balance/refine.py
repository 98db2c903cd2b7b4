"""Local search that evens out the workload of data-parallel ranks without breaking a packing."""

from __future__ import annotations

import numpy as np

# Stop when the heaviest rank is this close to the mean; a step then waits for it less than its own noise.
_TARGET_IMBALANCE = 0.002
_MAX_EXCHANGES = 64
# Rows of one rank that are looked at in one exchange; more only matters where balance is easy anyway.
_MAX_CANDIDATES = 256


def even_out(ranks: list[list[list[int]]], sizes: np.ndarray, workload: np.ndarray, cap: int) -> None:
    """Moves and swaps items from the heaviest rank to lighter ones while that evens out their workload. In place.

    ranks[rank][bin] = items. Keeps the number of bins, leaves none empty, keeps every bin within cap.
    """
    loads = np.array([sum(float(workload[items].sum()) for items in bins) for bins in ranks])
    for _ in range(_MAX_EXCHANGES):
        heavy = int(loads.argmax())
        if loads[heavy] <= loads.mean() * (1 + _TARGET_IMBALANCE):
            return
        for light in np.argsort(loads, kind="stable")[:-1].tolist():
            shifted = _exchange(ranks[heavy], ranks[light], sizes, workload, cap, loads[heavy] - loads[light])
            if shifted is not None:
                loads[heavy] -= shifted
                loads[light] += shifted
                break
        else:
            return


def _exchange(
    heavy: list[list[int]], light: list[list[int]], sizes: np.ndarray, workload: np.ndarray, cap: int, gap: float
) -> float | None:
    """Does the move or swap that brings closest to half the gap across; the workload brought, None if none helps."""
    items_h, bins_h, room_h, alone_h = _candidates(heavy, sizes, cap)
    items_l, bins_l, room_l, _ = _candidates(light, sizes, cap)
    # Rows: an item of the heavy rank. Columns: swap with an item of the light rank; last: move without return.
    brought = np.concatenate([workload[items_h, None] - workload[None, items_l], workload[items_h, None]], axis=1)
    grown_l = sizes[items_h, None] - sizes[None, items_l]
    fits = (grown_l <= room_l[bins_l]) & (-grown_l <= room_h[bins_h, None])
    emptiest = int(room_l.argmax())
    can_move = (sizes[items_h] <= room_l[emptiest]) & ~alone_h
    allowed = np.concatenate([fits, can_move[:, None]], axis=1) & (brought > 0) & (brought < gap)
    if not allowed.any():
        return None
    error = np.where(allowed, np.abs(brought - gap / 2), np.inf)
    row, column = np.unravel_index(int(error.argmin()), error.shape)
    item = int(items_h[row])
    heavy[bins_h[row]].remove(item)
    if column == len(items_l):
        light[emptiest].append(item)
    else:
        other = int(items_l[column])
        light[bins_l[column]].remove(other)
        light[bins_l[column]].append(item)
        heavy[bins_h[row]].append(other)
    return float(brought[row, column])


def _candidates(
    bins: list[list[int]], sizes: np.ndarray, cap: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(items, bin of each item, room of each bin, whether the item is alone in its bin)."""
    items = np.concatenate([np.asarray(b) for b in bins])
    counts = np.array([len(b) for b in bins])
    bin_of = np.repeat(np.arange(len(bins)), counts)
    room = cap - np.array([sizes[b].sum() for b in bins])
    if len(items) > _MAX_CANDIDATES:
        keep = np.linspace(0, len(items) - 1, _MAX_CANDIDATES).astype(np.int64)
        items, bin_of = items[keep], bin_of[keep]
    return items, bin_of, room, counts[bin_of] == 1
