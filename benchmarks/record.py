"""Where and with what a benchmark ran, and the dated JSON file it leaves."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
# Results of other benchmarks are no change of what is measured.
RESULTS = ":(exclude)benchmarks/results"
PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "ray", "transformer-engine", "flash-attn", "apex")


# A machine is quiet when its load of the last minute is below this.
QUIET_LOAD = 0.3
# A busy minute before takes about two to fade out of that load.
QUIET_LIMIT_S, QUIET_LOOK_S = 180.0, 5.0


def add_now(parser: argparse.ArgumentParser) -> None:
    """Adds --now, which `machine` takes."""
    parser.add_argument("--now", action="store_true", help="do not wait until the machine is quiet")


def wait_until_quiet() -> float:
    """Returns when the load is below QUIET_LOAD, at the latest after QUIET_LIMIT_S; the seconds that it waited."""
    start = time.monotonic()
    while (load := os.getloadavg()[0]) >= QUIET_LOAD:
        waited_s = time.monotonic() - start
        if waited_s >= QUIET_LIMIT_S:
            print(f"not quiet after {waited_s:.0f} s (load {load:.2f}): the result says so", flush=True)
            return waited_s
        time.sleep(QUIET_LOOK_S)
    return time.monotonic() - start


def machine(device: str, *, now: bool) -> dict[str, Any]:
    """What the benchmark runs on, once that is quiet.  now: do not wait.

    load_average: runnable processes over the last 1, 5 and 15 minutes, before the benchmark adds its own.
    waited_s: until the machine was quiet, or the wait was given up; null: it did not wait.
    """
    waited_s = None if now else round(wait_until_quiet(), 1)
    description = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "waited_s": waited_s,
    }
    if device == "cuda":
        import torch

        description |= {"gpu": torch.cuda.get_device_name(), "num_gpus": torch.cuda.device_count()}
    return description


def _cpu_model() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.machine()


def versions() -> dict[str, str]:
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def commit() -> str:
    """Hash of HEAD, with `+changes` when tracked files of the package or the benchmarks differ from it."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git(
            "status", "--porcelain", "--untracked-files=no", "--", "scalerl", "benchmarks", "examples", RESULTS
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def command(arguments: Sequence[str]) -> str:
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def keep(
    benchmark: str,
    arguments: Sequence[str],
    options: Mapping[str, Any],
    ran_on: Mapping[str, Any],
    result: Mapping[str, Any],
    *,
    device: str | None = None,
    **more: Any,
) -> int:
    """Writes options["out"], or results/{date}-{benchmark}[-{device}].json beside this file; says where. Returns 0.

    arguments: the command line.  options: parsed.  ran_on: `machine`, before the benchmark began.
    """
    names = [date.today().isoformat(), benchmark.replace("_", "-"), *([device] if device else [])]
    path = Path(options["out"] or Path(__file__).parent / "results" / f"{'-'.join(names)}.json")
    content = {
        "benchmark": benchmark,
        "command": command(arguments),
        "options": {key: value for key, value in options.items() if key != "out"},
        **more,
        "machine": ran_on,
        "versions": versions(),
        "commit": commit(),
        "result": result,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten: {path}")
    return 0


def table(rows: Sequence[tuple[str, str, str]]) -> str:
    """name, number, what it is."""
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {number:>{widths[1]}}  {note}".rstrip() for name, number, note in rows)
