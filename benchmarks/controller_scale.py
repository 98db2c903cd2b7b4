"""Driver seconds of a step at the scale of a cluster: scalerl's own controller, ranks and servers that answer at once.

python benchmarks/controller_scale.py                        # 8, 64, 256, 1,024 data-parallel ranks, 128 samples each
python benchmarks/controller_scale.py --dp 8 64 --steps 1    # a look
python benchmarks/controller_scale.py --tp 2 --critic --dump # with a critic on ranks of its own, and dumps

The loop (`trainer.ppo.train_step`), sample stream, ledger, planner, dispatch, collection, advantages, metrics and the
servers' order are the product's. Behind them stand real Ray actors, a few in the place of all ranks, and one for each
rollout worker: they answer with what a rank would, without a model. So what is measured is the driver (and, with it on
the same cores, Ray and those actors). The limit is the driver's processor time for as many calls of the ranks that do
nothing: Ray's own share. Bytes and references are all that pass through the driver in one step, which is not timed:
arguments of calls, values that it fetches, and what it puts into the object store. No GPU, no Megatron, no SGLang.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

# What the aim is stated for.
SAMPLES_PER_RANK = 128
DP_SIZES = (8, 64, 256, 1024)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, nargs="+", default=list(DP_SIZES), help="data-parallel ranks")
    parser.add_argument("--samples-per-rank", type=int, default=SAMPLES_PER_RANK)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of each data-parallel one")
    parser.add_argument("--critic", action="store_true", help="PPO with a critic on half as many ranks of its own")
    parser.add_argument("--dump", action="store_true", help="every step dumps its samples, as far as the driver goes")
    parser.add_argument("--processes", type=int, default=2, help="Ray actors that answer for all ranks")
    parser.add_argument("--rollout-workers", type=int, help="default: as many as a run has, one per 8 servers")
    parser.add_argument("--steps", type=int, default=2, help="timed steps, after one that is not")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-controller-scale.json")
    record.add_now(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    ran_on = record.machine("cpu", now=options.now)
    logging.disable(logging.WARNING)
    measured = [measure(options, dp_size) for dp_size in options.dp]
    result = {"sizes": measured, "growth": growth(measured)}
    print(report(result))
    return record.keep("controller_scale", arguments, vars(options), ran_on, result)


def measure(options: argparse.Namespace, dp_size: int) -> dict[str, Any]:
    """One size, on a Ray cluster of its own."""
    import scale_parts
    from remote_calls import Phases, RemoteCalls

    from scalerl.cluster.processes import Processes
    from scalerl.trainer.ppo import train_step

    with (
        Processes.start(num_workers=options.processes + 2, device="cpu") as processes,
        tempfile.TemporaryDirectory() as directory,
    ):
        pool = processes.acquire_pool(
            nnodes=1, devices_per_node=options.processes + 1, device="cpu", timeout_s=60.0, section="trainer"
        )
        try:
            calls, cpu_s = RemoteCalls(), Phases(time.process_time)

            def on_phase(name: str) -> None:
                calls.enter(name)
                cpu_s.enter(name)

            dump_dir = Path(directory) if options.dump else None
            run = scale_parts.make_run(options, dp_size, pool, dump_dir=dump_dir, on_phase=on_phase)
            # As `trainer.build.ppo_run` does before the first step.
            gc.collect()
            with calls.counted():
                outcome = train_step(run, 1)
            steps = []
            for step in range(2, options.steps + 2):
                run.timers.pop()
                cpu_s.pop()
                began = time.monotonic()
                outcome = train_step(run, step)
                timing_s = dict(run.timers.pop())
                logging_began = time.monotonic()
                cpu_s.enter("step_metrics")
                scale_parts.log(run, outcome, step, timing_s)
                ended = time.monotonic()
                phases = {name: seconds for name, seconds in timing_s.items() if name != "step"}
                phases_cpu_s = cpu_s.pop()
                place_s, place_cpu_s = scale_parts.seconds_of_place(run)
                steps.append(
                    {
                        "wall_s": ended - began,
                        "driver_cpu_s": sum(phases_cpu_s.values()),
                        "phases_s": halves(phases, place_s) | {"step_metrics": ended - logging_began},
                        "phases_cpu_s": halves(phases_cpu_s, place_cpu_s),
                    }
                )
                run.step = step
            of_ray_s = scale_parts.seconds_of_empty_calls(run, calls.by_actor()["RankProcess"])
        finally:
            pool.release()
    num_samples = dp_size * options.samples_per_rank
    return {
        "dp_size": dp_size,
        "num_ranks": sum(group.world_size for group in run.worker_groups),
        "num_samples": num_samples,
        "num_rollout_workers": len(run.rollout.workers),
        "wall_s": record.spread([step["wall_s"] for step in steps]),
        "driver_cpu_s": record.spread([step["driver_cpu_s"] for step in steps]),
        "empty_calls_cpu_s": of_ray_s,
        "bytes_per_sample": calls.num_bytes.total() / num_samples,
        "bytes": dict(calls.num_bytes),
        "references": dict(calls.references),
        "remote_calls": calls.by_actor(),
        **{
            key: {name: record.spread([step[key].get(name, 0.0) for step in steps]) for name in steps[0][key]}
            for key in ("phases_s", "phases_cpu_s")
        },
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def halves(phases_s: Mapping[str, float], place_s: float) -> dict[str, float]:
    """The phases with the two halves of `balance`, each under a name of its own too.  place_s: of the second one."""
    return {**phases_s, "balance: plan": phases_s["balance"] - place_s, "balance: place": place_s}


def growth(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per pair of neighbouring sizes and phase, the exponent of its growth with the samples; 1: as they grow.

    phases_s: of wall time.  phases_cpu_s: of the driver's processor time.
    """
    return [
        {
            "from_dp_size": smaller["dp_size"],
            "to_dp_size": larger["dp_size"],
            **{key: exponents(smaller, larger, key) for key in ("phases_s", "phases_cpu_s")},
        }
        for smaller, larger in itertools.pairwise(measured)
    ]


def exponents(smaller: dict[str, Any], larger: dict[str, Any], key: str) -> dict[str, float]:
    ratio = math.log(larger["num_samples"] / smaller["num_samples"])
    return {
        name: math.log(max(seconds["median"], 1e-6) / max(smaller[key][name]["median"], 1e-6)) / ratio
        for name, seconds in larger[key].items()
        if name in smaller[key]
    }


def report(result: dict[str, Any]) -> str:
    sizes, pairs = result["sizes"], result["growth"]

    def line(label: str, numbers: list[Any], form: str = "{:>10.3f}", more: str = "") -> str:
        return " ".join([f"{label:<28}", *(form.format(number) for number in numbers), more]).rstrip()

    heads = [f"{'dp ' + str(size['dp_size']):>10}" for size in sizes]
    grown = [f"{pair['from_dp_size']}-{pair['to_dp_size']}" for pair in pairs]
    lines = [" ".join([f"{'seconds of':<28}", *heads, "  growth of", *grown])]
    lines.append(line("the step, wall", [size["wall_s"]["median"] for size in sizes]))
    lines.append(line("the driver, processor", [size["driver_cpu_s"]["median"] for size in sizes]))
    lines.append(line("limit: its calls, empty", [size["empty_calls_cpu_s"] for size in sizes]))
    for key, kind in (("phases_s", "wall"), ("phases_cpu_s", "processor")):
        last = sizes[-1][key]
        lines.append(f"{kind}:")
        for name in sorted(last, key=lambda name: -last[name]["median"]):
            numbers = [size[key].get(name, {"median": 0.0})["median"] for size in sizes]
            exponents_of = [f"{pair[key][name]:>9.2f}" for pair in pairs if name in pair[key]]
            lines.append(line(f"  {name}", numbers, more="  ".join(exponents_of)))
    lines.append(line("bytes a sample", [size["bytes_per_sample"] for size in sizes], "{:>10.0f}"))
    for name in sorted(sizes[-1]["bytes"], key=lambda name: -sizes[-1]["bytes"][name]):
        per_sample = [size["bytes"].get(name, 0) / size["num_samples"] for size in sizes]
        lines.append(line(f"  {name}", per_sample, "{:>10.1f}"))
    references = [size["references"] for size in sizes]
    lines.append(line("references", [sum(counts.values()) for counts in references], "{:>10}"))
    for name in references[-1]:
        lines.append(line(f"  {name}", [counts.get(name, 0) for counts in references], "{:>10}"))
    lines += ["calls of"]
    for actor, by_phase in sizes[-1]["remote_calls"].items():
        per_size = [size["remote_calls"].get(actor, {}) for size in sizes]
        lines.append(line(f"  {actor}", [sum(counts.values()) for counts in per_size], "{:>10}"))
        lines += [line(f"    {phase}", [counts.get(phase, 0) for counts in per_size], "{:>10}") for phase in by_phase]
    lines.append(line("driver, peak GiB", [size["peak_rss_gib"] for size in sizes], "{:>10.2f}"))
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
