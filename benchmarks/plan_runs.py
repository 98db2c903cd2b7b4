"""Runs of this machine against the plan: rates are read from some runs, and the phases of all are predicted.

python benchmarks/plan_runs.py

Two models, each with tensor parallelism and on two data-parallel ranks with other batches and lengths. The rates are
those that `scalerl plan --calibrate RUN RUN` reads from the runs with tensor parallelism, and from each of these alone.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import end_to_end
import record

LARGE = ["--model", "60m", "--steps", "3", "--mini-batch", "4", "--n", "4"]
# Name -> the command line of end_to_end.py.
RUNS = {
    "quickstart": [],
    "quickstart, other layout": ["--tp", "1", "--prompts", "128"],
    "60m": [*LARGE, "--prompts", "16", "--", "data.max_response_length=64"],
    "60m, other layout": [*LARGE, "--tp", "1", "--prompts", "8", "--", "data.max_response_length=96"],
}
# The runs that rates are read from.
SOURCES = (("quickstart", "60m"), ("quickstart",), ("60m",))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-plan-runs-cpu.json")
    record.add_now(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    from scalerl.extras.plan.calibrate import MeasuredRun, comparison, rates

    options = parse(arguments)
    ran_on = record.machine("cpu", now=options.now)
    result: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        runs = {}
        for name, own in RUNS.items():
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            end_to_end.run_trainer(end_to_end.parse(own, "cpu"), "cpu", directory)
            runs[name] = MeasuredRun.read(directory / "run")
    for names in SOURCES:
        source, hardware = " and ".join(names), rates([runs[name] for name in names])
        for target, run in runs.items():
            step = run.predicted(hardware)
            print(f"\n{target}, with the rates of {source}\n{comparison(run, hardware)}", flush=True)
            result[f"{source} -> {target}"] = {
                phase: {"measured_s": seconds, "predicted_s": step.seconds(phase)}
                for phase, seconds in run.seconds.items()
            }
    return record.keep("plan_runs", arguments, vars(options), ran_on, result, device="cpu")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
