"""Drawing of a run's curves as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

Curve = Sequence[tuple[int, float]]

# Title and keys of each panel. A key that ends with * stands for all keys with that prefix.
PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("critic/score/mean", "critic/score/max", "critic/score/min")),
    ("validation", ("val-core/*", "val/loss")),
    ("loss", ("train/loss", "actor/pg_loss", "critic/vf_loss")),
    ("response length (tokens)", ("response_length/mean", "response_length/max")),
    ("entropy and KL", ("actor/entropy", "actor/ppo_kl", "actor/kl_loss")),
    ("gradient norm", ("actor/grad_norm", "critic/grad_norm", "train/grad_norm")),
    ("sampler and trainer", ("training/rollout_probs_diff_max", "training/rollout_probs_diff_mean")),
    ("throughput (tokens/s per device)", ("perf/throughput",)),
)


def keys_to_plot(keys: Sequence[str]) -> list[str]:
    """Those of `keys` that `draw` shows."""
    return [key for key in keys if any(_matches(key, pattern) for _, patterns in PANELS for pattern in patterns)]


def draw(curves: Mapping[str, Curve], path: Path, title: str) -> bool:
    """Draws a PNG with one panel for each of PANELS that has a curve.

    curves: (step, value) points by key; of points of one step the last counts.
    Returns False, and writes no file, when no panel has a curve.
    """
    panels = []
    for name, patterns in PANELS:
        keys = [key for pattern in patterns for key in sorted(curves) if _matches(key, pattern) and curves[key]]
        if keys:
            panels.append((name, keys))
    if not panels:
        return False
    # Not pyplot, whose state is global to the process: this runs in a thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(12, 3 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for number, (name, keys) in enumerate(panels, start=1):
        axes = figure.add_subplot(num_rows, 2, number)
        for key in keys:
            steps, values = zip(*sorted(dict(curves[key]).items()), strict=True)
            axes.plot(steps, values, label=key, marker="." if len(steps) < 50 else None)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, format="png")
    return True


def _matches(key: str, pattern: str) -> bool:
    return key.startswith(pattern[:-1]) if pattern.endswith("*") else key == pattern
