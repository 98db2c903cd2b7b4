"""Driver seconds of a step at the scale of a cluster: scalerl's own controller, ranks and servers that answer at once.

python benchmarks/controller_scale.py                        # 8, 64, 256, 1,024 data-parallel ranks, 128 samples each
python benchmarks/controller_scale.py --dp 8 64 --steps 1    # a look

The loop (`trainer.ppo.train_step`), sample stream, ledger, planner, dispatch, collection, advantages, metrics and the
servers' order are the product's. Behind them stand real Ray actors, a few in the place of all ranks, and one for each
rollout worker: they answer with what a rank would, without a model. So what is measured is the driver (and, with it on
the same cores, Ray and those actors). The limit is the driver's processor time for as many calls of the ranks that do
nothing: Ray's own share. No GPU, no Megatron, no SGLang.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import resource
import sys
import time
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
    from remote_calls import RemoteCalls

    from scalerl.cluster.processes import Processes
    from scalerl.runtime.garbage import collect_garbage
    from scalerl.trainer.ppo import train_step

    with Processes.start(num_workers=options.processes + 2, device="cpu") as processes:
        pool = processes.take_pool(
            nnodes=1, devices_per_node=options.processes + 1, device="cpu", timeout_s=60.0, section="trainer"
        )
        try:
            calls = RemoteCalls()
            run = scale_parts.make_run(options, dp_size, pool, on_phase=calls.enter)
            # As `trainer.build.ppo_run` does before the first step.
            collect_garbage()
            scale_parts.count_bytes(True)
            with calls.counted():
                outcome = train_step(run, 1)
            num_bytes = scale_parts.count_bytes(False)
            steps = []
            for step in range(2, options.steps + 2):
                run.timers.pop()
                cpu, began = time.process_time(), time.monotonic()
                outcome = train_step(run, step)
                timing_s = dict(run.timers.pop())
                logging_began = time.monotonic()
                scale_parts.log(run, outcome, step, timing_s)
                ended = time.monotonic()
                phases = {name: seconds for name, seconds in timing_s.items() if name != "step"}
                steps.append(
                    {
                        "wall_s": ended - began,
                        "driver_cpu_s": time.process_time() - cpu,
                        "phases_s": phases | {"step_metrics": ended - logging_began},
                    }
                )
                run.step = step
            of_ray_s = scale_parts.seconds_of_empty_calls(run, calls.by_actor()["RankProcess"])
        finally:
            pool.release()
    num_samples = dp_size * options.samples_per_rank
    return {
        "dp_size": dp_size,
        "num_ranks": dp_size * options.tp,
        "num_samples": num_samples,
        "num_rollout_workers": len(run.rollout.workers),
        "wall_s": record.spread([step["wall_s"] for step in steps]),
        "driver_cpu_s": record.spread([step["driver_cpu_s"] for step in steps]),
        "empty_calls_cpu_s": of_ray_s,
        "bytes_per_sample": num_bytes / num_samples,
        "remote_calls": calls.by_actor(),
        "phases_s": {
            name: record.spread([step["phases_s"].get(name, 0.0) for step in steps]) for name in steps[0]["phases_s"]
        },
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def growth(measured: list[dict[str, Any]]) -> dict[str, float]:
    """Per phase, the exponent of its growth with the samples, from the smallest to the largest size; 1: as they do."""
    if len(measured) < 2:
        return {}
    first, last = measured[0], measured[-1]
    ratio = math.log(last["num_samples"] / first["num_samples"])
    return {
        name: math.log(max(seconds["median"], 1e-6) / max(first["phases_s"][name]["median"], 1e-6)) / ratio
        for name, seconds in last["phases_s"].items()
        if name in first["phases_s"]
    }


def report(result: dict[str, Any]) -> str:
    sizes = result["sizes"]
    names = sorted(sizes[-1]["phases_s"], key=lambda name: -sizes[-1]["phases_s"][name]["median"])
    lines = [" ".join([f"{'seconds of':<28}", *(f"{'dp ' + str(size['dp_size']):>10}" for size in sizes), "  growth"])]
    rows = [("the step, wall", "wall_s"), ("the driver, processor", "driver_cpu_s")]
    lines += [" ".join([f"{label:<28}", *(f"{size[key]['median']:>10.3f}" for size in sizes)]) for label, key in rows]
    lines.append(
        " ".join([f"{'limit: its calls, empty':<28}", *(f"{size['empty_calls_cpu_s']:>10.3f}" for size in sizes)])
    )
    for name in names:
        numbers = [f"{size['phases_s'].get(name, {'median': 0.0})['median']:>10.3f}" for size in sizes]
        exponent = result["growth"].get(name)
        lines.append(" ".join([f"  {name:<26}", *numbers, "" if exponent is None else f"  {exponent:.2f}"]))
    lines.append(" ".join([f"{'bytes a sample':<28}", *(f"{size['bytes_per_sample']:>10.0f}" for size in sizes)]))
    lines += ["calls of"]
    for actor, by_phase in sizes[-1]["remote_calls"].items():
        per_size = [size["remote_calls"].get(actor, {}) for size in sizes]
        rows_of_actor = {actor: [sum(counts.values()) for counts in per_size]}
        rows_of_actor |= {f"  {phase}": [counts.get(phase, 0) for counts in per_size] for phase in by_phase}
        for label, counts in rows_of_actor.items():
            lines.append(" ".join([f"  {label:<26}", *(f"{count:>10}" for count in counts)]))
    lines.append(" ".join([f"{'driver, peak GiB':<28}", *(f"{size['peak_rss_gib']:>10.2f}" for size in sizes)]))
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
