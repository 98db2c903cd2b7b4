"""The charts of a report, as figures of plotly: `{"data": [...], "layout": {...}}`."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from scalerl.extras.report.run_files import RunFiles

Figure = dict[str, Any]
# Points of a curve; of more steps each point is the most unusual one of some steps.
MAX_POINTS = 1000
# The parts of a step in their order, so that each has one colour in all charts.
PARTS = (
    *("gen", "balance", "old_log_prob", "ref", "values", "reward_model", "adv", "update_critic", "update_actor"),
    *("update", "update_weights", "dump_rollout_generations", "testing", "save_checkpoint", "profile", "metrics"),
    "untimed",
)
COLOURS = (
    *("#4269d0", "#9c9ede", "#efb118", "#ff8ab7", "#6cc5b0", "#97bbf5", "#b5bd61", "#9c6b4e", "#ff725c"),
    *("#ff725c", "#3ca951", "#c7c7c7", "#a463f2", "#8c6d31", "#636363", "#9498a0", "#d9d9d9"),
)
COLOUR_OF = dict(zip(PARTS, COLOURS, strict=True))


@dataclass(frozen=True)
class Chart:
    """A chart of curves.  metrics: key, or with * at its end the begin of keys, -> name in the chart."""

    title: str
    unit: str
    metrics: Mapping[str, str] = field(default_factory=dict)


LEARNING = (
    Chart("Reward", "score", {"critic/score/mean": "score", "critic/rewards/mean": "what the policy learns from"}),
    Chart("Validation", "", {"val-core/*": ""}),
    Chart("Loss", "nats", {"train/loss": "training", "val/loss": "validation"}),
    Chart("Groups whose samples have one score", "share of groups", {"reward/equal_groups_frac": "equal"}),
)
STABILITY = (
    Chart(
        "KL",
        "nats",
        {
            "actor/kl_loss": "to the reference, in the loss",
            "actor/reward_kl_penalty": "to the reference, in the reward",
            "actor/ppo_kl": "of the update",
        },
    ),
    Chart("Entropy", "nats", {"actor/entropy": "entropy"}),
    Chart("Length of responses", "tokens", {"response_length/mean": "mean", "response_length/max": "longest"}),
    Chart("Responses that the limit cut", "share of responses", {"response_length/clip_ratio": "cut"}),
    Chart(
        "Mismatch of sampler and trainer",
        "mean difference of probabilities",
        {"training/rollout_probs_diff_mean": "probability", "rollout_corr/k3_kl": "KL (k3), nats"},
    ),
    Chart(
        "Norm of the gradient",
        "",
        {"actor/grad_norm": "actor", "critic/grad_norm": "critic", "train/grad_norm": "model"},
    ),
    Chart("Staleness", "steps", {"training/staleness/mean": "mean", "training/staleness/max": "oldest sample"}),
)
TIME = (
    Chart("Throughput", "tokens/s and device", {"perf/throughput": "tokens"}),
    Chart("FLOP utilization", "share of the peak", {"perf/mfu/*": "", "train/mfu": "actor"}),
)
PACKING = (
    Chart("Padding", "share of tokens", {"packing/padding_frac": "alignment tokens"}),
    Chart(
        "Micro-batches over the least possible",
        "share",
        {"packing/optimality_gap": "more than the lower bound"},
    ),
    Chart(
        "Tokens of a data-parallel rank",
        "tokens",
        {
            "global_seqlen/balanced_max": "most, balanced",
            "global_seqlen/balanced_min": "fewest, balanced",
            "global_seqlen/max": "most, unbalanced",
            "global_seqlen/min": "fewest, unbalanced",
        },
    ),
)
MEMORY = (
    Chart(
        "Memory of the fullest rank",
        "GiB",
        {
            "perf/max_memory_reserved_gb": "reserved",
            "perf/max_memory_allocated_gb": "allocated",
            "perf/cpu_memory_used_gb": "its node",
        },
    ),
)


def curves(chart: Chart, runs: Sequence[RunFiles]) -> Figure | None:
    """The chart of one run, or of several in one; None where none has a metric of it."""
    traces = []
    for number, run in enumerate(runs):
        named = [(key, name) for pattern, name in chart.metrics.items() for key in run.keys(pattern)]
        drawn: list[tuple[list[int], list[float]]] = []
        for key, name in named:
            steps, values = points = thinned(*run.series(key))
            # One curve would hide the other.
            if points in drawn:
                continue
            drawn.append(points)
            label = name or _short(key, chart)
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers" if len(steps) < 20 else "lines",
                    "name": _text(f"{run.name}: {label}" if len(runs) > 1 else label),
                    "x": steps,
                    "y": [value if math.isfinite(value) else None for value in values],
                    "line": {"dash": "solid" if number == 0 else "dot"},
                }
            )
    return {"data": traces, "layout": layout(chart.title, "step", chart.unit)} if traces else None


def _short(key: str, chart: Chart) -> str:
    """The part of a key in which those of a pattern differ."""
    prefix = next((pattern[:-1] for pattern in chart.metrics if pattern.endswith("*")), "")
    return key.removeprefix(prefix) if prefix else key.partition("/")[0]


def phases(run: RunFiles, *, with_name: bool = False) -> Figure | None:
    """The steps of a run, each as a stack of its parts.  with_name: the title has that of the run."""
    steps = run.trained
    names = [name for name in PARTS if any(f"timing_s/{name}" in run.steps[step] for step in steps)]
    known = {f"timing_s/{name}" for name in (*PARTS, "step")}
    # Of a training loop of the user's own.
    others = sorted(key for key in run.keys("timing_s/*") if key.count("/") == 1 and key not in known)
    names += [key.partition("/")[2] for key in others]
    shown = [max(part, key=lambda step: run.steps[step]["timing_s/step"]) for part in parts_of(steps)]
    traces = [
        {
            "type": "bar",
            "name": _text(name),
            "x": shown,
            "y": [run.steps[step].get(f"timing_s/{name}", 0.0) for step in shown],
            "marker": {"color": COLOUR_OF.get(name)},
        }
        for name in names
    ]
    title = f"Seconds of a step{f': {_text(run.name)}' if with_name else ''}"
    if len(shown) < len(steps):
        title += f" (the longest of each {len(parts_of(steps)[0])})"
    stacked = layout(title, "step", "s") | {"barmode": "stack", "bargap": 0}
    return {"data": traces, "layout": stacked} if traces else None


def parts_of(items: Sequence[int]) -> list[Sequence[int]]:
    """The items in at most MAX_POINTS parts of about equal size."""
    number = min(MAX_POINTS, len(items))
    bounds = [place * len(items) // number for place in range(number + 1)] if number else []
    return [items[start:end] for start, end in pairwise(bounds)]


def thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """At most MAX_POINTS points of a curve; of the steps that share one, the one farthest from their mean."""
    kept = []
    for part in parts_of(range(len(steps))):
        finite = [values[place] for place in part if math.isfinite(values[place])]
        mean = sum(finite) / len(finite) if finite else 0.0
        kept.append(max(part, key=lambda place: abs(values[place] - mean) if math.isfinite(values[place]) else -1.0))
    return [steps[place] for place in kept], [values[place] for place in kept]


def bars(title: str, unit: str, named: Mapping[str, Mapping[str, float]]) -> Figure:
    """Groups of bars.  named: name of a group's bar -> group -> value."""
    traces = [
        {"type": "bar", "name": _text(name), "x": list(map(_text, values)), "y": list(values.values())}
        for name, values in named.items()
    ]
    return {"data": traces, "layout": layout(title, "", unit) | {"barmode": "group"}}


def layout(title: str, x: str, y: str) -> dict[str, Any]:
    return {
        "title": {"text": title, "font": {"size": 15}, "x": 0, "pad": {"l": 10}},
        "xaxis": {"title": {"text": x}, "automargin": True},
        "yaxis": {"title": {"text": y}, "automargin": True, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": -0.25},
        "margin": {"l": 10, "r": 10, "t": 40, "b": 10},
        "showlegend": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
    }


def _text(text: str) -> str:
    """A name for plotly, which reads a few tags of HTML in texts."""
    return html.escape(str(text))
