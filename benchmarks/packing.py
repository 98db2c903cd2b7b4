"""Packing and balance of a step's plan against the rules of three other systems, re-implemented from descriptions.

python benchmarks/packing.py                     # one core, about two minutes
python benchmarks/packing.py --batches 20        # fewer batches of each distribution

Lengths: the two log-normal distributions of the comparison, and lengths of real texts (the docstrings of Python's
standard library, in bytes).
"""

from __future__ import annotations

import argparse
import ast
import functools
import heapq
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

if TYPE_CHECKING:
    import numpy as np

    from scalerl.models.flops import FlopsShape

# [rank][micro-batch] = samples
Ranks = list[list[list[int]]]
LARGE_BATCHES = (8192, 131072)
LARGE_DP_SIZES = (8, 64)


@dataclass(frozen=True)
class Distribution:
    """Lengths (tokens) of samples, and the size of a micro-batch that they are packed into."""

    name: str
    max_tokens_per_micro_batch: int
    draw: Callable[[Any, int], Any]


def log_normal(mu: float, sigma: float, longest: int, max_tokens_per_micro_batch: int) -> Distribution:
    def draw(random: np.random.Generator, count: int) -> np.ndarray:
        return random.lognormal(mu, sigma, count).clip(1, longest).astype(int)

    return Distribution(f"lognormal({mu:g},{sigma:g})<={longest // 1024}k", max_tokens_per_micro_batch, draw)


def real_texts(longest: int, max_tokens_per_micro_batch: int) -> Distribution:
    def draw(random: np.random.Generator, count: int) -> np.ndarray:
        return random.choice(docstring_lengths(), count).clip(1, longest)

    return Distribution(f"stdlib docstrings<={longest // 1024}k", max_tokens_per_micro_batch, draw)


@functools.cache
def docstring_lengths() -> np.ndarray:
    """Bytes of every docstring of the standard library's modules, classes and functions, by file and position."""
    import numpy as np

    library = Path(sysconfig.get_path("stdlib"))
    lengths = []
    for path in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(path.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    lengths.append(len(text.encode("utf-8", "replace")))
    return np.array(lengths)


DISTRIBUTIONS = (log_normal(7, 1, 8192, 16384), log_normal(8.5, 1.2, 32768, 32768), real_texts(4096, 4096))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=200, help="batches of each distribution")
    parser.add_argument("--samples", type=int, default=128, help="samples of a batch")
    parser.add_argument("--dp", type=int, default=8, help="data-parallel ranks")
    parser.add_argument("--large", type=int, nargs="*", default=list(LARGE_BATCHES), help="sizes of the timed batches")
    parser.add_argument("--repeats", type=int, default=3, help="timed plans of each large batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-packing.json")
    record.add_now(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    ran_on = record.machine("cpu", now=options.now)
    shape = model_shape()
    compared = {
        distribution.name: compare(distribution, shape, options.batches, options.samples, options.dp, options.seed)
        for distribution in DISTRIBUTIONS
    }
    timed = [
        time_plan(distribution, shape, num_samples, dp_size, options.repeats, options.seed)
        for num_samples in options.large
        for dp_size in LARGE_DP_SIZES
        for distribution in DISTRIBUTIONS
        if num_samples >= dp_size
    ]
    result = {"num_real_texts": len(docstring_lengths()), "compared": compared, "timed": timed}
    print(report(result))
    return record.keep("packing", arguments, vars(options), ran_on, result)


def model_shape() -> FlopsShape:
    """Qwen2.5-1.5B: its FLOPs are the workload that is balanced and measured."""
    from scalerl.models.flops import FlopsShape

    return FlopsShape(
        num_layers=28, hidden_size=1536, num_heads=12, num_kv_heads=2, head_dim=128, ffn_hidden_size=8960,
        vocab_size=151936,
    )  # fmt: skip


# planners: (lengths, FLOPs of each, dp_size, max_tokens_per_micro_batch) -> Ranks


def ours(lengths: np.ndarray, workload: np.ndarray, dp_size: int, max_tokens_per_micro_batch: int) -> Ranks:
    from scalerl.batch import plan_step

    plan = plan_step(
        lengths,
        dp_size=dp_size,
        mini_batches=[range(len(lengths))],
        max_tokens_per_micro_batch=max_tokens_per_micro_batch,
        workload_S=workload,
    )
    return [[list(micro) for micro in mini] for (mini,) in plan.micro_batches]


def verl(lengths: np.ndarray, workload: np.ndarray, dp_size: int, max_tokens_per_micro_batch: int) -> Ranks:
    """verl: samples to ranks, then a rank's samples to micro-batches, both by Karmarkar-Karp on 24576 l + l^2.

    Ranks get equal numbers of samples, and each as many micro-batches as the rank with the most needs by
    ceil(tokens / max_tokens_per_micro_batch). Nothing holds a micro-batch to it.
    """
    cost = 24576.0 * lengths + lengths.astype(float) ** 2
    by_rank = karmarkar_karp(cost, dp_size, equal_counts=True)
    count = max(-(-int(lengths[items].sum()) // max_tokens_per_micro_batch) for items in by_rank)
    ranks = []
    for items in by_rank:
        bins = karmarkar_karp(cost[items], min(count, len(items)))
        ranks.append([[items[at] for at in bin_] for bin_ in bins])
    return ranks


def karmarkar_karp(cost: np.ndarray, num_parts: int, equal_counts: bool = False) -> list[list[int]]:
    """Largest differencing: the two partial partitions with the widest spread are joined, heaviest part with lightest.

    equal_counts: begins with one sample of similar cost in every part, so that all parts grow alike.
    """
    ascending = cost.argsort(kind="stable").tolist()
    size = num_parts if equal_counts else 1
    assert len(ascending) % size == 0, "equal counts need a multiple of the parts"
    heap = []
    for order, start in enumerate(range(0, len(ascending), size)):
        parts = [(float(cost[item]), [item]) for item in ascending[start : start + size]]
        parts = sorted(parts + [(0.0, [])] * (num_parts - size), key=lambda part: -part[0])
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], order, parts))
    order = len(heap)
    while len(heap) > 1:
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        parts = [(a + b, left + right) for (a, left), (b, right) in zip(first, reversed(second), strict=True)]
        parts.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], order, parts))
        order += 1
    return [items for _, items in heap[0][2]]


def slime(lengths: np.ndarray, workload: np.ndarray, dp_size: int, max_tokens_per_micro_batch: int) -> Ranks:
    """slime: first fit over the whole batch in its order, then micro-batches dealt to the ranks in turn."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for item, length in enumerate(lengths.tolist()):
        index = next((at for at, room in enumerate(rooms) if room >= length), len(bins))
        if index == len(bins):
            bins.append([])
            rooms.append(max_tokens_per_micro_batch)
        bins[index].append(item)
        rooms[index] -= length
    return deal(bins, lengths, dp_size)


def nemo(lengths: np.ndarray, workload: np.ndarray, dp_size: int, max_tokens_per_micro_batch: int) -> Ranks:
    """NeMo-RL: modified first fit decreasing over the whole batch, then micro-batches dealt to the ranks in turn."""
    return deal(modified_first_fit_decreasing(lengths.tolist(), max_tokens_per_micro_batch), lengths, dp_size)


def modified_first_fit_decreasing(sizes: list[int], max_tokens_per_micro_batch: int) -> list[list[int]]:
    """Johnson and Garey 1985. Large: over half a bin. Medium: over a third. Small: over a sixth. Tiny: the rest."""
    descending = sorted(range(len(sizes)), key=lambda item: (-sizes[item], item))
    bins = [[item] for item in descending if 2 * sizes[item] > max_tokens_per_micro_batch]
    rooms = [max_tokens_per_micro_batch - sizes[items[0]] for items in bins]
    medium = [item for item in descending if 2 * sizes[item] <= max_tokens_per_micro_batch < 3 * sizes[item]]
    small = [item for item in descending if 3 * sizes[item] <= max_tokens_per_micro_batch < 6 * sizes[item]]
    tiny = [item for item in descending if 6 * sizes[item] <= max_tokens_per_micro_batch]

    def put(index: int, item: int, source: list[int]) -> None:
        source.remove(item)
        bins[index].append(item)
        rooms[index] -= sizes[item]

    def largest_that_fits(room: int, source: list[int]) -> int | None:
        return next((item for item in source if sizes[item] <= room), None)

    # Bins of the large items, roomiest last: a medium item each where one fits.
    for index in range(len(bins)):
        item = largest_that_fits(rooms[index], medium)
        if item is not None:
            put(index, item, medium)
    # Backwards through those without: the smallest small item and the largest that still fits beside it.
    for index in reversed(range(len(bins))):
        if len(bins[index]) > 1:
            continue
        if len(small) < 2 or sizes[small[-1]] + sizes[small[-2]] > rooms[index]:
            break
        put(index, small[-1], small)
        beside = largest_that_fits(rooms[index], small)
        assert beside is not None
        put(index, beside, small)
    rest = sorted(medium + small + tiny, key=lambda item: (-sizes[item], item))
    for index in range(len(bins)):
        while (item := largest_that_fits(rooms[index], rest)) is not None:
            put(index, item, rest)
    opened = len(bins)
    for item in rest:
        index = next((at for at in range(opened, len(bins)) if rooms[at] >= sizes[item]), len(bins))
        if index == len(bins):
            bins.append([])
            rooms.append(max_tokens_per_micro_batch)
        bins[index].append(item)
        rooms[index] -= sizes[item]
    return bins


def deal(bins: list[list[int]], lengths: np.ndarray, dp_size: int) -> Ranks:
    """In turn to the ranks. Ranks need equal counts: the longest bins of two or more samples are halved until then."""
    bins = [list(items) for items in bins]
    while len(bins) % dp_size:
        index = max((at for at in range(len(bins)) if len(bins[at]) > 1), key=lambda at: lengths[bins[at]].sum())
        items = bins[index]
        bins[index], extra = items[0::2], items[1::2]
        bins.append(extra)
    return [bins[rank::dp_size] for rank in range(dp_size)]


PLANNERS = {"scalerl": ours, "verl": verl, "slime": slime, "nemo": nemo}


# measurement


def compare(
    distribution: Distribution, shape: FlopsShape, num_batches: int, num_samples: int, dp_size: int, seed: int
) -> dict[str, Any]:
    """Every planner on the same batches. Imbalance: FLOPs of the heaviest rank over the mean of the ranks.

    Avoidable: over what the longest sample alone forces.  verl_whole_batch: its rule for micro-batches,
    ceil(tokens / max_tokens_per_micro_batch), on the whole batch, without the slack of rounding up on each rank.
    """
    import numpy as np

    from scalerl.batch.bin_packing import lower_bound, round_up

    batches = [distribution.draw(np.random.default_rng([seed, at]), num_samples) for at in range(num_batches)]
    bounds = [lower_bound(lengths, distribution.max_tokens_per_micro_batch) for lengths in batches]
    comparison: dict[str, Any] = {
        "max_tokens_per_micro_batch": distribution.max_tokens_per_micro_batch,
        "mean_tokens": float(np.mean(batches)),
        "lower_bound": float(np.mean(bounds)),
        "lower_bound_equal_counts": float(np.mean([round_up(bound, dp_size) for bound in bounds])),
    }
    for name, planner in PLANNERS.items():
        measured = [
            assess(planner, lengths, shape, dp_size, distribution.max_tokens_per_micro_batch) for lengths in batches
        ]
        imbalance = [one["imbalance"] for one in measured]
        used = [one["num_micro_batches"] for one in measured]
        comparison[name] = {
            "num_micro_batches": float(np.mean(used)),
            "optimality_gap": float(np.mean(used)) / comparison["lower_bound_equal_counts"] - 1.0,
            "batches_over_cap": sum(one["worst_fill"] > 1 for one in measured),
            "worst_fill": max(one["worst_fill"] for one in measured),
            "imbalance_mean": float(np.mean(imbalance)),
            "imbalance_max": max(imbalance),
            "avoidable_imbalance_max": max(one["imbalance"] / one["least_imbalance"] for one in measured),
            "plan_ms_mean": 1e3 * float(np.mean([one["cpu_s"] for one in measured])),
        }
    whole = [assess(verl, lengths, shape, 1, distribution.max_tokens_per_micro_batch) for lengths in batches]
    comparison["verl_whole_batch"] = {
        "num_micro_batches": float(np.mean([one["num_micro_batches"] for one in whole])),
        "batches_over_cap": sum(one["worst_fill"] > 1 for one in whole),
        "worst_fill": max(one["worst_fill"] for one in whole),
    }
    return comparison


def assess(
    planner: Callable[..., Ranks], lengths: np.ndarray, shape: FlopsShape, dp_size: int, max_tokens_per_micro_batch: int
) -> dict[str, float]:
    import numpy as np

    workload = shape.forward_each(lengths)
    begin = time.process_time()
    ranks = planner(lengths, workload, dp_size, max_tokens_per_micro_batch)
    cpu_s = time.process_time() - begin
    assert sorted(item for rank in ranks for items in rank for item in items) == list(range(len(lengths)))
    assert len({len(rank) for rank in ranks}) == 1, "unequal counts of micro-batches"
    loads = np.array([sum(workload[items].sum() for items in rank) for rank in ranks])
    return {
        "num_micro_batches": sum(len(rank) for rank in ranks),
        "worst_fill": max(float(lengths[items].sum()) for rank in ranks for items in rank) / max_tokens_per_micro_batch,
        "imbalance": float(loads.max() / loads.mean()),
        "least_imbalance": max(1.0, float(workload.max() / loads.mean())),
        "cpu_s": cpu_s,
    }


def time_plan(
    distribution: Distribution, shape: FlopsShape, num_samples: int, dp_size: int, repeats: int, seed: int
) -> dict[str, Any]:
    """Our planner on one large batch: processor seconds of its one thread, and wall seconds."""
    import numpy as np

    from scalerl.batch.bin_packing import lower_bound, round_up

    lengths = distribution.draw(np.random.default_rng(seed), num_samples)
    workload = shape.forward_each(lengths)
    cpu_s, wall_s = [], []
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        ours(lengths, workload, dp_size, distribution.max_tokens_per_micro_batch)
        cpu_s.append(time.process_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
    assessed = assess(ours, lengths, shape, dp_size, distribution.max_tokens_per_micro_batch)
    bound = round_up(lower_bound(lengths, distribution.max_tokens_per_micro_batch), dp_size)
    return {
        "distribution": distribution.name,
        "num_samples": num_samples,
        "dp_size": dp_size,
        "cpu_s": record.spread(cpu_s),
        "wall_s": record.spread(wall_s),
        "num_micro_batches": assessed["num_micro_batches"],
        "optimality_gap": assessed["num_micro_batches"] / bound - 1.0,
        "imbalance": assessed["imbalance"],
        "worst_fill": assessed["worst_fill"],
    }


def report(result: dict[str, Any]) -> str:
    heads = {"over": 9, "fill": 7, "micro-b.": 10, "gap": 8, "imbalance": 11, "worst": 8, "avoidable": 11, "ms": 8}
    lines = [" " * 36 + "".join(f"{name:>{width}}" for name, width in heads.items())]
    for name, comparison in result["compared"].items():
        lines.append(
            f"{name}, micro-batches of {comparison['max_tokens_per_micro_batch']} tokens: at least "
            f"{comparison['lower_bound_equal_counts']:.2f}"
        )
        for planner in PLANNERS:
            one = comparison[planner]
            lines.append(
                f"    {planner:<32}{one['batches_over_cap']:>9}{one['worst_fill']:>7.3f}"
                f"{one['num_micro_batches']:>10.2f}{one['optimality_gap']:>8.3f}{one['imbalance_mean']:>11.4f}"
                f"{one['imbalance_max']:>8.4f}{one['avoidable_imbalance_max']:>11.4f}{one['plan_ms_mean']:>8.2f}"
            )
        whole = comparison["verl_whole_batch"]
        lines.append(
            f"    {'verl, one rank for all':<32}{whole['batches_over_cap']:>9}{whole['worst_fill']:>7.3f}"
            f"{whole['num_micro_batches']:>10.2f}"
        )
    lines.append("\nscalerl on large batches (processor seconds: fastest, median)")
    for one in result["timed"]:
        lines.append(
            f"    {one['distribution']:<24}{one['num_samples']:>8} samples, dp {one['dp_size']:>3}: "
            f"{one['cpu_s']['min']:.3f} s, {one['cpu_s']['median']:.3f} s; gap {one['optimality_gap']:.4f}, "
            f"imbalance {one['imbalance']:.5f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
