"""The sections of charts that a run's page in MLflow begins with.

That page makes one section for each prefix of metric names and sorts them by name; nothing that a run logs can ask for
another order. So the metrics that a person looks at first are logged a second time, under names that sort first.
"""

from __future__ import annotations

from collections.abc import Mapping

# Section, and the metrics in it with the names of their charts. A key that ends with * stands for all keys with that
# prefix; their charts have the rest of the key as name.
SECTIONS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("1 reward", {"critic/score/mean": "score", "reward_extra/*": ""}),
    ("1 loss", {"train/loss": "loss", "train/grad_norm": "gradient norm"}),
    ("2 validation", {"val-core/*": "", "val/loss": "loss"}),
    (
        "3 response length",
        {
            "response_length/mean": "mean",
            "response_length/max": "longest",
            "response_length/clip_ratio": "share cut off",
        },
    ),
    (
        "4 KL and entropy",
        {
            "actor/entropy": "entropy",
            "actor/kl_loss": "KL to the reference",
            "actor/reward_kl_penalty": "KL to the reference in the reward",
            "actor/ppo_kl": "KL of the update",
        },
    ),
    (
        "5 throughput",
        {
            "perf/throughput": "tokens per s and device",
            "perf/time_per_step": "s per step",
            "perf/mfu/actor": "MFU",
            "train/mfu": "MFU",
        },
    ),
)


def with_sections(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, and those of SECTIONS once more as `section/chart`."""
    copies = {}
    for section, charts in SECTIONS:
        for pattern, chart in charts.items():
            if pattern.endswith("*"):
                prefix = pattern[:-1]
                rests = {key: key.removeprefix(prefix) for key in metrics if key.startswith(prefix)}
                copies |= {f"{section}/{rest.replace('/', ' ')}": metrics[key] for key, rest in rests.items()}
            elif pattern in metrics:
                copies[f"{section}/{chart}"] = metrics[pattern]
    return {**copies, **metrics}
