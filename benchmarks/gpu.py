"""What one GPU can show of this checkout, in order of value, within a limit of time.

python benchmarks/gpu.py --limit-s 600 --out outputs/gpu
python benchmarks/gpu.py --rehearse --out outputs/gpu-rehearsal      # the same commands on a CPU, as small as they get

Each stage is a command of its own. Its output is in OUT/NAME.log, its result in OUT/NAME.json or OUT/NAME.xml, and
OUT/stages.jsonl gets a line at its end. A stage is killed, with the processes below it, at its own limit or at that of
the whole; one that has less than half of its limit is left out. Exit code 0: every stage that ran ended with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
# Seconds in which a stage may end by itself once it is told to.
GRACE_S = 15.0
NEEDS_SGLANG = (
    "test_weight_transports or test_device_handover or the_server_serves or server_of_a_mixture or test_main_ppo"
)


@dataclass(frozen=True)
class Stage:
    """One command.  limit_s: after which it is killed.  arguments: of Python."""

    name: str
    limit_s: float
    arguments: Sequence[str]


def stages(out: Path, rehearse: bool, run_keys: Sequence[str]) -> Iterator[Stage]:
    """Yields the stages, the most valuable first.  run_keys: further keys of the run on SGLang."""

    def benchmark(script: str, name: str, *arguments: str) -> list[str]:
        return [f"benchmarks/{script}.py", "--now", "--out", f"{out}/{name}.json", *arguments]

    def run(name: str, rollout: str, *keys: str) -> list[str]:
        size = ["--steps", "1", "--warmup", "1", "--prompts", "4", "--mini-batch", "4", "--n", "2"]
        if not rehearse:
            size = ["--model", "0.6b", "--steps", "3", "--warmup", "1", "--prompts", "32"]
            keys = ("data.max_response_length=256", "actor_rollout_ref.actor.max_tokens_per_micro_batch=16384", *keys)
        # Every sync is compared, not only the first three.
        keys = ("actor_rollout_ref.rollout.verify_weights_every=1", *keys)
        return benchmark("end_to_end", name, *size, "--ceiling-s", "0.5", "--rollout", rollout, "--", *keys)

    def update(name: str, *arguments: str) -> list[str]:
        size = ["--hidden", "128", "--layers", "1", "--lengths", "short", "--max-tokens-per-micro-batch", "128"]
        if not rehearse:
            size = ["--model", *arguments, "--max-tokens-per-micro-batch", "16384"]
        repeats = ["--rounds", "1", "--repeats", "3", "--warmup", "1", "--ceiling-s", "0.5"]
        return benchmark("actor_update", name, *size, "--seqs", "16", *repeats, "--no-compare")

    def tests(name: str, expression: str, processes: int) -> list[str]:
        pytest = ["-m", "pytest", "tests/gpu", "-q", "-W", "ignore", "-p", "no:cacheprovider", "--durations", "20"]
        pytest += ["--junitxml", f"{out}/{name}.xml", "-k", expression]
        return pytest + (["-n", str(processes)] if processes > 1 and find_spec("xdist") else [])

    with_sglang = find_spec("sglang") is not None
    yield Stage("doctor", 90, ["-m", "scalerl.cli", "doctor", "--gpu"])
    if with_sglang:
        yield Stage("run-sglang", 240, run("run-sglang", "sglang", *run_keys))
        yield Stage("tests-sglang", 240, tests("tests-sglang", NEEDS_SGLANG, 1))
    yield Stage("update-1.7b", 120, update("update-1.7b", "1.7b", "--lengths", "constant"))
    yield Stage("tests", 240, tests("tests", f"not ({NEEDS_SGLANG})", min(8, (os.cpu_count() or 2) // 2)))
    yield Stage("run-embedded", 240, run("run-embedded", "embedded", "data.max_response_length=64"))
    size = ["--model", "quickstart"] if rehearse else ["--model", "0.6b", "--device", "cuda"]
    yield Stage("checkpoint", 180, benchmark("checkpoint", "checkpoint", *size, "--repeats", "1"))
    yield Stage("update-0.6b", 100, update("update-0.6b", "0.6b", "--lengths", "short"))


def run_stage(stage: Stage, out: Path, limit_s: float) -> int | None:
    """Runs a stage; its exit code, None where limit_s seconds were not enough."""
    with (out / f"{stage.name}.log").open("w") as log:
        job = psutil.Popen(
            [sys.executable, *stage.arguments], cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            return job.wait(limit_s)
        except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
            return None
        finally:
            end(job)


def end(job: psutil.Popen) -> None:
    """Ends a stage's process and all below it: SIGTERM to the first, then SIGKILL to what is left."""
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        below = job.children(recursive=True)
        job.terminate()
    psutil.wait_procs([job], timeout=GRACE_S)
    for process in [job, *below]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs([job, *below], timeout=GRACE_S)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=1800.0, help="seconds for all stages")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these stages, in their order")
    parser.add_argument("--rehearse", action="store_true", help="small, on a CPU")
    parser.add_argument("--out", type=Path, required=True, help="the result folder")
    parser.add_argument("run_keys", nargs="*", help="after --: further keys of the run on SGLang")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    out, deadline = options.out.absolute(), time.monotonic() + options.limit_s
    every = list(stages(out, options.rehearse, options.run_keys))
    if unknown := sorted(set(options.only or ()) - {stage.name for stage in every}):
        sys.exit(f"--only {' '.join(unknown)}: there is {', '.join(stage.name for stage in every)}")
    out.mkdir(parents=True, exist_ok=True)
    codes = []
    with (out / "stages.jsonl").open("w") as file:
        for stage in every:
            if options.only and stage.name not in options.only:
                continue
            left_s = deadline - time.monotonic() - GRACE_S
            if left_s < stage.limit_s / 2:
                print(f"{stage.name}: left out, {max(0.0, left_s):.0f} s are left", flush=True)
                continue
            print(f"{stage.name}: python {' '.join(stage.arguments)}", flush=True)
            began = time.monotonic()
            code = run_stage(stage, out, min(stage.limit_s, left_s))
            codes.append(code)
            line = {"stage": stage.name, "code": code, "seconds": round(time.monotonic() - began, 1)}
            file.write(json.dumps(line) + "\n")
            file.flush()
            said = "ended by its limit" if code is None else f"exit code {code}"
            print(f"{stage.name}: {said}, {line['seconds']} s; {out / stage.name}.log", flush=True)
    return 0 if codes and not any(code != 0 for code in codes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
