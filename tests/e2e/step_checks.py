"""What holds in every step of every run, whatever it is about."""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from tests.unit.tracking.metrics.test_documented_keys import DOC, patterns

# Of the steps of a run: what their parts may leave out. On a busy machine steps of half a second left out a thousandth
# where this was written, and one of 400 steps of 46 ms a thirtieth, while it waited for the processor; that nothing but
# trifles is in between, tests/unit/trainer/test_phases.py sees in the code.
UNTIMED_FRAC = 0.02
# Of a shorter step one wait for the processor may be a larger part.
LONG_STEP_S = 1.0


def check_steps(steps: Iterable[Mapping[str, float]], own_keys: Collection[str] = ()) -> None:
    """steps: all that was logged at each step of a run. own_keys: of code that is the test's own."""
    known, steps = patterns(DOC.read_text(encoding="utf-8")), list(steps)
    logged = {key for metrics in steps for key in metrics} - set(own_keys)
    unknown = [key for key in sorted(logged) if not any(pattern.match(key) for pattern in known)]
    assert unknown == [], "not in docs/metrics.md"
    check_timing(*(metrics for metrics in steps if "timing_s/step" in metrics), shortest_s=LONG_STEP_S)


def check_timing(*steps: Mapping[str, float], shortest_s: float = 0.0) -> None:
    """The parts of each step add up to it, without what was measured as the rest.

    shortest_s: of shorter steps only that their parts are no more than the step.
    """
    left_out_s = whole_s = 0.0
    for metrics in steps:
        step_s = metrics["timing_s/step"]
        parts = {key: value for key, value in metrics.items() if key.startswith("timing_s/") and key.count("/") == 1}
        parts_s = sum(parts.values()) - step_s - parts["timing_s/untimed"]
        assert parts_s <= step_s, parts
        if step_s >= shortest_s:
            left_out_s, whole_s = left_out_s + step_s - parts_s, whole_s + step_s
    assert left_out_s <= UNTIMED_FRAC * whole_s, (left_out_s, whole_s)


def check_profile(run_dir: Path, step: int, names: Collection[str], phases: Collection[str]) -> None:
    """The profile of a step has these ranks and, in each trace, these phases with operations of torch in them."""
    directory = run_dir / f"profile_step_{step}"
    assert {file.name for file in directory.iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("trace.json.gz", "memory.txt")
    }
    for name in names:
        with gzip.open(directory / f"{name}.trace.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        ranges = {event["name"]: event for event in events if event.get("cat") == "user_annotation"}
        assert set(phases) <= ranges.keys()
        for phase in phases:
            start, end = ranges[phase]["ts"], ranges[phase]["ts"] + ranges[phase]["dur"]
            inside = {event["name"] for event in events if event.get("cat") == "cpu_op" and start < event["ts"] < end}
            assert "aten::mm" in inside, phase
        assert "aten::mm" in (directory / f"{name}.memory.txt").read_text()
