"""Faults and restarts of a run on the axis of its time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from scalerl.extras.report.charts import Figure, layout
from scalerl.extras.report.run_files import RunFiles

# Metric that counts faults -> what one is.
COUNTED = {
    "rollout/num_restarts": "server restarted",
    "reward/num_judge_restarts": "judge's server restarted",
    "training/num_rank_restarts": "ranks restarted",
    "rollout/num_resubmitted": "samples asked again",
    "rollout/num_left_out": "samples without a result",
    "reward/num_failed": "rewards failed",
    "actor/skipped_updates": "updates skipped",
    "critic/skipped_updates": "updates of the critic skipped",
    "train/skipped_updates": "updates skipped",
    "checkpoint/failed_saves": "saves failed",
    "checkpoint/failed_uploads": "uploads failed",
}
CONTINUED = "continued"


@dataclass(frozen=True)
class Fault:
    """Something that went wrong.  at_s: seconds since 1970; None where the run has no timeline."""

    what: str
    number: int
    step: int
    at_s: float | None


def faults(run: RunFiles) -> list[Fault]:
    """The faults that a run counted, and the times that it was continued, in order of their steps."""
    ended_s = {step: max((span.end_s for span in spans), default=None) for step, spans in run.timeline.items()}
    found = [
        Fault(what, round(run.steps[step][key]), step, ended_s.get(step))
        for key, what in COUNTED.items()
        for step in sorted(run.steps)
        if run.steps[step].get(key, 0.0) > 0
    ]
    found += [Fault(CONTINUED, 1, step, at_s) for step, at_s in run.resumes]
    return sorted(found, key=lambda fault: (fault.step, fault.what))


def fault_figure(run: RunFiles, found: list[Fault]) -> Figure | None:
    """Each fault by its time, or its step where times are not known, below the time that each step ended."""
    if not found:
        return None
    has_times = all(fault.at_s is not None for fault in found)
    kinds = list(dict.fromkeys(fault.what for fault in found))
    traces = []
    for kind in kinds:
        mine = [fault for fault in found if fault.what == kind]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": kind,
                "x": [_time(fault.at_s) if has_times else fault.step for fault in mine],
                "y": [kind for _ in mine],
                "text": [f"{fault.number} at step {fault.step}" for fault in mine],
                "hovertemplate": "%{text}<extra>%{y}</extra>",
                "marker": {"size": 11, "symbol": "diamond" if kind == CONTINUED else "x"},
            }
        )
    made: Figure = layout("Faults and restarts", "time" if has_times else "step", "") | {"showlegend": False}
    made["yaxis"] |= {"categoryorder": "array", "categoryarray": kinds[::-1]}
    made["height"] = 140 + 30 * len(kinds)
    if has_times:
        ends = [max(span.end_s for span in spans) for spans in run.timeline.values() if spans]
        margin_s = 0.03 * (max(ends) - min(ends)) + 1
        made["xaxis"] |= {"type": "date", "range": [_time(min(ends) - margin_s), _time(max(ends) + margin_s)]}
    return {"data": traces, "layout": made}


def _time(at_s: float | None) -> str:
    return datetime.fromtimestamp(at_s or 0.0, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
