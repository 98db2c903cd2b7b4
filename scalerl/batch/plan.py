"""The plan of a step: the micro-batch and the data-parallel rank in which each sample trains.

One plan serves every pass of the step (old log-probs, reference, update), so a sample stays on its rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scalerl.batch.alignment import NO_ALIGNMENT, Alignment
from scalerl.batch.bin_packing import (
    Bins,
    bin_sums,
    fewest_bins,
    group_evenly,
    least_loaded,
    least_loaded_in_order,
    lower_bound,
    pack_bins,
    round_up,
    split_to,
)
from scalerl.batch.refine import even_out

MicroBatch = tuple[int, ...]
# From this many samples of a mini-batch on, one attempt at packing takes a tenth of a second.
_MANY = 65536


@dataclass(frozen=True)
class SizeKeys:
    """The configuration's names of two sizes, for errors.

    max_tokens_per_micro_batch: its key.  mini_batch: name of the number of a mini-batch's samples.
    """

    max_tokens_per_micro_batch: str = "max_tokens_per_micro_batch"
    mini_batch: str = "the samples of a mini-batch"


DEFAULT_KEYS = SizeKeys()


@dataclass(frozen=True)
class StepPlan:
    """The rows that each data-parallel rank trains in each micro-batch of a step.

    micro_batches[dp_rank][mini_batch][micro_batch] = row indices of the step's batch, ascending.

    All ranks have the same number of micro-batches in a mini-batch; none is empty; every row is in exactly one.

    lower_bounds: per mini-batch, micro-batches of each rank that no plan under the same rules can go below.
    num_padded_tokens: padding tokens that the layout's alignment adds to the batch in one pass, over all ranks.
    """

    micro_batches: tuple[tuple[tuple[MicroBatch, ...], ...], ...]
    lower_bounds: tuple[int, ...]
    num_padded_tokens: int = 0

    @property
    def dp_size(self) -> int:
        return len(self.micro_batches)

    @property
    def num_mini_batches(self) -> int:
        return len(self.micro_batches[0])

    @property
    def num_micro_batches(self) -> tuple[int, ...]:
        """Micro-batches of each rank, per mini-batch."""
        return tuple(len(mini_batch) for mini_batch in self.micro_batches[0])

    def rows(self, dp_rank: int) -> tuple[int, ...]:
        """Rows of a rank in the order in which it trains them."""
        return self._rows[dp_rank]

    @cached_property
    def _rows(self) -> tuple[tuple[int, ...], ...]:
        chained = itertools.chain.from_iterable
        return tuple(tuple(chained(chained(minis))) for minis in self.micro_batches)

    @cached_property
    def rows_by_rank(self) -> np.ndarray:
        """[S] the rows of all ranks, one rank's after the other's."""
        return np.fromiter(itertools.chain.from_iterable(self._rows), np.int64)

    @cached_property
    def starts(self) -> list[int]:
        """[dp_size + 1] where the rows of each rank begin in rows_by_rank, and their end."""
        return [0, *itertools.accumulate(map(len, self._rows))]

    def local_micro_batches(self, dp_rank: int) -> tuple[tuple[MicroBatch, ...], ...]:
        """[mini_batch][micro_batch] = positions in rows(dp_rank), for a shard that holds only the rank's rows."""
        return self._local_micro_batches[dp_rank]

    @cached_property
    def _local_micro_batches(self) -> tuple[tuple[tuple[MicroBatch, ...], ...], ...]:
        def positions_of(minis: Sequence[Sequence[MicroBatch]]) -> tuple[tuple[MicroBatch, ...], ...]:
            positions = iter(range(sum(len(micro) for mini in minis for micro in mini)))
            return tuple(tuple(tuple(itertools.islice(positions, len(micro))) for micro in mini) for mini in minis)

        return tuple(positions_of(minis) for minis in self.micro_batches)


def plan_step(
    num_tokens_S: Sequence[int] | np.ndarray,
    *,
    dp_size: int,
    mini_batches: Sequence[Sequence[int]],
    max_tokens_per_micro_batch: int,
    workload_S: Sequence[float] | np.ndarray | None = None,
    name_of: Callable[[int], str] | None = None,
    micro_batch_multiple: int = 1,
    alignment: Alignment = NO_ALIGNMENT,
    keys: SizeKeys = DEFAULT_KEYS,
) -> StepPlan:
    """Packs each mini-batch into few micro-batches, none over its tokens, and balances the ranks' workload.

    num_tokens_S: [S] tokens per sample.  mini_batches: row indices of each optimizer update; every row in exactly one.
    workload_S: [S] positive cost of a sample in any unit; default: its tokens.  name_of: names a row in errors.
    micro_batch_multiple: the number of a rank's micro-batches in a mini-batch is a multiple of it (virtual pipeline).
    alignment: padding of sequences and micro-batches by the layout; it counts towards max_tokens_per_micro_batch.
    keys: configuration keys that set max_tokens_per_micro_batch and the samples of a mini-batch, for errors.
    Micro-batches of a mini-batch over all ranks: the smallest multiple of dp_size * micro_batch_multiple for which a
    packing was found, never more than first-fit-decreasing needs, rounded up to that multiple.
    Equal input gives an equal plan.
    Raises ValueError naming the sample for one over max_tokens_per_micro_batch or without tokens; for rows missing or
    twice; for a mini-batch with too few rows to give every rank its micro-batches.
    """
    num_tokens_S = np.asarray(num_tokens_S, dtype=np.int64)
    workload_S = num_tokens_S.astype(np.float64) if workload_S is None else np.asarray(workload_S, dtype=np.float64)
    minis = [np.asarray(rows, dtype=np.int64).reshape(-1) for rows in mini_batches]

    def named(row: int) -> str:
        return f"sample {row}" if name_of is None else f"sample {row} ({name_of(row)})"

    _check_sizes(dp_size, micro_batch_multiple, max_tokens_per_micro_batch, len(minis))
    # The capacity of a bin: whole units of the alignment.
    cap = max_tokens_per_micro_batch // alignment.micro_batch * alignment.micro_batch
    sizes_S = alignment.of_sequences(num_tokens_S)
    _check_samples(num_tokens_S, sizes_S, workload_S, cap, named, alignment, keys)
    _check_partition(minis, len(num_tokens_S), named)
    multiple = dp_size * micro_batch_multiple
    plans, lower_bounds, num_computed = [], [], 0
    for number, rows in enumerate(minis):
        if len(rows) < multiple:
            raise ValueError(_too_few_rows(number, len(rows), dp_size, micro_batch_multiple, keys))
        sizes = sizes_S[rows]
        ranks = _plan_mini_batch(sizes, workload_S[rows], dp_size, micro_batch_multiple, cap, number, keys)
        plans.append(_ordered(ranks, rows, workload_S))
        lower_bounds.append(round_up(lower_bound(sizes, cap), multiple) // dp_size)
        num_computed += int(alignment.of_micro_batch(bin_sums([bin_ for bins in ranks for bin_ in bins], sizes)).sum())
    return StepPlan(
        tuple(tuple(plan[rank] for plan in plans) for rank in range(dp_size)),
        tuple(lower_bounds),
        num_computed - int(num_tokens_S.sum()),
    )


def _plan_mini_batch(
    sizes: np.ndarray, workload: np.ndarray, dp_size: int, multiple: int, cap: int, number: int, keys: SizeKeys
) -> list[Bins]:
    """The items of each micro-batch of each rank, as [rank][micro-batch] = items."""
    step = dp_size * multiple
    total, smallest = int(sizes.sum()), int(sizes.min())
    by_rank = least_loaded(np.zeros(len(sizes)), workload, dp_size, np.inf)
    # Nothing is too large for a bin without a limit.
    assert by_rank is not None

    def balanced(count: int) -> list[Bins] | None:
        if count > len(sizes):
            return None
        ranks = _pack_each_rank(by_rank, sizes, workload, count // dp_size, cap)
        # With less free room than one smallest item per bin this rarely works: try it only where it costs little.
        hopeless = len(sizes) > _MANY and count * cap - total < count * smallest
        if ranks is None and not hopeless:
            bins = least_loaded(sizes, workload, count, cap)
            ranks = None if bins is None else _deal(bins, workload, count, dp_size)
        return ranks

    ranks, bins, count = fewest_bins(sizes, cap, step, balanced)
    if count > len(sizes):
        raise ValueError(
            f"mini-batch {number} of {len(sizes)} samples needs {count} micro-batches of {cap} tokens (a multiple of "
            f"dp_size {dp_size} x micro_batch_multiple {multiple}), more than it has samples: raise "
            f"{keys.max_tokens_per_micro_batch}, or make {keys.mini_batch} a multiple of {step}"
        )
    if ranks is None:
        ranks = _deal(bins, workload, count, dp_size)
    even_out(ranks, sizes, workload, cap)
    return ranks


def _pack_each_rank(
    by_rank: Bins, sizes: np.ndarray, workload: np.ndarray, num_bins: int, cap: int
) -> list[Bins] | None:
    """Packs each rank's items by themselves: the best balance, but a rank's items may not fit (None)."""
    ranks = []
    dealt, ends = _flat(by_rank)
    sizes_in_order, work_in_order = sizes[dealt].tolist(), workload[dealt].tolist()
    for items, end in zip(by_rank, ends, strict=True):
        mine = slice(end - len(items), end)
        if len(items) < num_bins or sum(sizes_in_order[mine]) > num_bins * cap:
            return None
        # They were dealt to the rank by decreasing workload.
        bins = least_loaded_in_order(items, sizes_in_order[mine], work_in_order[mine], num_bins, cap)
        if bins is None or not all(bins):
            bins = pack_bins(sizes[items], workload[items], num_bins, cap)
            if bins is None:
                return None
            bins = [[items[i] for i in bin_] for bin_ in bins]
        ranks.append(bins)
    return ranks


def _deal(bins: Bins, workload: np.ndarray, count: int, dp_size: int) -> list[Bins]:
    """Deals bins that are packed already to the ranks, `count` in all, balanced by workload."""
    bins = split_to(bins, workload, count)
    loads = bin_sums(bins, workload)
    return [[bins[index] for index in group] for group in group_evenly(loads, dp_size)]


def _flat(bins: Bins) -> tuple[np.ndarray, list[int]]:
    """The items of all bins, one bin's after the other's, and where each bin ends."""
    ends = list(itertools.accumulate(map(len, bins)))
    return np.fromiter(itertools.chain.from_iterable(bins), np.int64, ends[-1]), ends


def _ordered(ranks: Sequence[Bins], rows: np.ndarray, workload_S: np.ndarray) -> list[tuple[MicroBatch, ...]]:
    """Each rank's micro-batches, equally many, with light ones first and last: a pipeline fills and drains quickly."""
    items, ends = _flat([items for bins in ranks for items in bins])
    numbers = rows[items].tolist()
    all_micros = iter([tuple(sorted(numbers[start:end])) for start, end in itertools.pairwise([0, *ends])])
    micros = [sorted(itertools.islice(all_micros, len(bins))) for bins in ranks]
    work = bin_sums(list(itertools.chain.from_iterable(micros)), workload_S).reshape(len(ranks), -1)
    orders = np.argsort(work, axis=1, kind="stable").tolist()
    return [
        tuple([rank_micros[index] for index in order[0::2] + order[1::2][::-1]])
        for rank_micros, order in zip(micros, orders, strict=True)
    ]


def seqlen_metrics(
    num_tokens_S: Sequence[int] | np.ndarray, plan: StepPlan, prefix: str = "global_seqlen"
) -> dict[str, float]:
    """Metrics of the tokens per data-parallel rank, before and after balancing.

    Before: rank r would get the r-th contiguous chunk of the batch, as numpy.array_split cuts it into dp_size chunks.
    After: what the plan gives rank r, over all mini-batches.
    {prefix}/min, max, mean: over the chunks before.  minmax_diff: max - min before.  balanced_min, balanced_max: after.
    """
    num_tokens_S = np.asarray(num_tokens_S, dtype=np.int64)
    before = [int(chunk.sum()) for chunk in np.array_split(num_tokens_S, plan.dp_size)]
    after = np.add.reduceat(num_tokens_S[plan.rows_by_rank], plan.starts[:-1])
    return {
        f"{prefix}/min": float(min(before)),
        f"{prefix}/max": float(max(before)),
        f"{prefix}/minmax_diff": float(max(before) - min(before)),
        f"{prefix}/balanced_min": float(after.min()),
        f"{prefix}/balanced_max": float(after.max()),
        f"{prefix}/mean": sum(before) / plan.dp_size,
    }


def packing_metrics(num_tokens_S: Sequence[int] | np.ndarray, plan: StepPlan) -> dict[str, float]:
    """Metrics of what a plan adds to the samples' own tokens and to the smallest possible number of micro-batches.

    packing/padding_frac: alignment tokens / computed tokens of a pass over the batch; computed is real + alignment.
    packing/optimality_gap: micro-batches of a rank in the step / their lower bound - 1. 0 proves that no plan needs
    fewer; above 0 the bound itself may be too low.  packing/num_micro_batches: micro-batches of each rank in the step.
    """
    num_tokens, num_micro_batches = int(np.sum(num_tokens_S)), sum(plan.num_micro_batches)
    return {
        "packing/padding_frac": plan.num_padded_tokens / (num_tokens + plan.num_padded_tokens),
        "packing/optimality_gap": num_micro_batches / sum(plan.lower_bounds) - 1.0,
        "packing/num_micro_batches": float(num_micro_batches),
    }


def _check_sizes(dp_size: int, multiple: int, max_tokens_per_micro_batch: int, num_mini_batches: int) -> None:
    for name, value in (
        ("dp_size", dp_size),
        ("micro_batch_multiple", multiple),
        ("max_tokens_per_micro_batch", max_tokens_per_micro_batch),
        ("number of mini_batches", num_mini_batches),
    ):
        if value < 1:
            raise ValueError(f"plan_step: {name} is {value}, must be at least 1")


def _check_samples(
    num_tokens_S: np.ndarray,
    sizes_S: np.ndarray,
    workload_S: np.ndarray,
    cap: int,
    named: Callable[[int], str],
    alignment: Alignment,
    keys: SizeKeys,
) -> None:
    if workload_S.shape != num_tokens_S.shape:
        raise ValueError(f"plan_step: {len(workload_S)} workloads for {len(num_tokens_S)} samples")
    size = "{tokens} tokens" if alignment.sequence == 1 else "{tokens} tokens ({size} in this layout)"
    for rows, problem in (
        (num_tokens_S < 1, "has {tokens} tokens: a sample needs at least one"),
        (
            sizes_S > cap,
            f"has {size}, over the {{cap}} of one micro-batch: set {keys.max_tokens_per_micro_batch} to at least "
            "{needed}, or "
            "shorten the data",
        ),
        (~(np.isfinite(workload_S) & (workload_S > 0)), "has workload {work}: must be positive and finite"),
    ):
        if rows.any():
            row = int(rows.argmax())
            facts = {"tokens": num_tokens_S[row], "size": sizes_S[row], "cap": cap, "work": workload_S[row]}
            needed = alignment.of_micro_batch(int(sizes_S[row]))
            raise ValueError(f"{named(row)} " + problem.format(**facts, needed=needed))


def _check_partition(minis: list[np.ndarray], num_samples: int, named: Callable[[int], str]) -> None:
    rows = np.concatenate(minis)
    if len(rows) and not (rows.min() >= 0 and rows.max() < num_samples):
        raise ValueError(f"mini_batches hold rows {rows.min()}..{rows.max()}, the batch has rows 0..{num_samples - 1}")
    times = np.bincount(rows, minlength=num_samples)
    if (times != 1).any():
        row = int((times != 1).argmax())
        raise ValueError(f"mini_batches must hold every row once: {named(row)} occurs {times[row]} times")


def _too_few_rows(number: int, num_rows: int, dp_size: int, multiple: int, keys: SizeKeys) -> str:
    each = "one micro-batch" if multiple == 1 else f"{multiple} micro-batches (virtual pipeline)"
    return (
        f"mini-batch {number} has {num_rows} samples, too few to give each of {dp_size} data-parallel ranks {each}: "
        f"make {keys.mini_batch} at least {dp_size * multiple}, or use fewer data-parallel ranks"
    )
