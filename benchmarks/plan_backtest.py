"""The plan's seconds against published steps: each row's error, the part of the rows that constants were fitted to.

python benchmarks/plan_backtest.py            # prints the table
python benchmarks/plan_backtest.py --docs     # ... and writes it into docs/planning.md
python benchmarks/plan_backtest.py --draw     # ... and draws the pictures of that page; takes minutes
python benchmarks/plan_backtest.py --fit      # fits the constants of scalerl/extras/plan/hardware.py again

Fitted are the rows whose name without the release has a SHA-256 that 3 divides: all releases of a run are on one side.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from scalerl.config import PPOConfig, composed
from scalerl.config.names import ACTOR, ROLLOUT
from scalerl.config.value_checks import device_memory_bytes
from scalerl.extras.plan.hardware import HARDWARE, Hardware
from scalerl.extras.plan.plan import memory_plan
from scalerl.extras.plan.seconds import StepSeconds, lengths_of, step_seconds
from scalerl.extras.plan.servers import ServerBytes
from scalerl.extras.plan.suggest import Change, changed
from scalerl.extras.plan.tune import tuned
from scalerl.models import ModelShape

REPOSITORY = Path(__file__).resolve().parent.parent
ROWS = REPOSITORY / "benchmarks" / "published_steps.yaml"
MODELS = REPOSITORY / "configs" / "models"
PAGE = REPOSITORY / "docs" / "planning.md"
MARKS = ("<!-- made by benchmarks/plan_backtest.py --docs -->", "<!-- end -->")
# What --fit changes, and the range of each.
FITTED = {
    "dense_frac": (0.3, 0.65),
    "mixture_layer_s": (5e-4, 1e-2),
    "memory_frac": (0.4, 0.9),
    "sync_frac": (0.1, 1.0),
    "round_layer_s": (3e-5, 4e-4),
    "token_s": (2e-6, 8e-5),
    "network_message_s": (2e-5, 3e-4),
}
DEVICES_PER_NODE = {"h100": 8, "gb200": 4}
SAMPLES_PER_UPDATE = 512
GROUP = 32


@dataclass(frozen=True)
class Row:
    """A published step.  policy: samples are at most so many steps old; None: servers share the trainer's devices."""

    release: float
    hardware: str
    model: Mapping[str, Any]
    model_name: str
    policy: int | None
    devices: int
    samples: int
    mean: int
    server_tp: int
    layout: tuple[int, int, int, int]
    seconds: float
    servers: int = 0
    quantization: str | None = None

    @property
    def run(self) -> str:
        """The name of the row without its release."""
        policy = "on" if self.policy is None else f"{self.policy}-off"
        return " ".join([self.hardware, self.model_name, policy, str(self.devices), *filter(None, [self.quantization])])

    @property
    def is_fitted(self) -> bool:
        return int(hashlib.sha256(self.run.encode()).hexdigest(), 16) % 3 == 0

    @cached_property
    def config(self) -> PPOConfig:
        return changed(_defaults(), self._change())

    @cached_property
    def shapes(self) -> dict[str, ModelShape]:
        file = MODELS / f"{self.model['file']}.json"
        sizes = json.loads(file.read_text(encoding="utf-8")) | self.model.get("sizes", {})
        shape = ModelShape.from_config(sizes)
        return {"actor": shape, "ref": shape}

    @cached_property
    def server(self) -> ServerBytes:
        plan = memory_plan(self.config, self.shapes, memory_bytes=device_memory_bytes(self.hardware))
        assert plan.server is not None and plan.concurrency, f"{self.run}: no sample fits a server's KV cache"
        return plan.server

    def predicted(self, hardware: Hardware) -> StepSeconds:
        return step_seconds(self.config, self.shapes, self.server, hardware, lengths_of(self.config, self.mean))

    def _change(self) -> Change:
        """The keys of the run.  rollout_is asks for a pass for the old log-probs."""
        tp, cp, ep, pp = self.layout
        per_node, prompt, longest = DEVICES_PER_NODE[self.hardware], self.model["prompt"], self.model["longest"]
        servers = 0 if self.policy is None else self.servers or self.devices // 2
        megatron = f"{ACTOR}.megatron"
        first, last = self.model.get("ends", {}).get(pp, (None, None))
        return {
            "data.max_prompt_length": prompt,
            "data.max_response_length": longest - prompt,
            "data.train_batch_size": self.samples // GROUP,
            f"{ACTOR}.ppo_mini_batch_size": SAMPLES_PER_UPDATE // GROUP,
            f"{ACTOR}.max_tokens_per_micro_batch": longest,
            f"{ACTOR}.use_kl_loss": True,
            f"{megatron}.tensor_model_parallel_size": tp,
            f"{megatron}.sequence_parallel": tp > 1,
            f"{megatron}.context_parallel_size": cp,
            f"{megatron}.expert_model_parallel_size": ep,
            f"{megatron}.expert_tensor_parallel_size": 1,
            f"{megatron}.pipeline_model_parallel_size": pp,
            f"{megatron}.num_layers_in_first_pipeline_stage": first,
            f"{megatron}.num_layers_in_last_pipeline_stage": last,
            f"{megatron}.recompute_granularity": "full" if self.model["recompute"] else None,
            **{f"{megatron}.{part}_offload": not servers for part in ("param", "grad", "optimizer")},
            f"{ROLLOUT}.n": GROUP,
            f"{ROLLOUT}.tensor_model_parallel_size": self.server_tp,
            f"{ROLLOUT}.gpu_memory_utilization": 0.8 if servers else 0.6,
            f"{ROLLOUT}.max_num_seqs": 1024,
            f"{ROLLOUT}.quantization": self.quantization,
            "algorithm.rollout_correction.rollout_is": "token",
            "trainer.n_gpus_per_node": per_node,
            "trainer.nnodes": (self.devices - servers) // per_node,
            "trainer.max_staleness": self.policy or 0,
            "trainer.save_freq": 0,
            "actor_rollout_ref.hybrid_engine": not servers,
            f"{ROLLOUT}.resource_pool.nnodes": servers // per_node,
            f"{ROLLOUT}.resource_pool.n_gpus_per_node": per_node,
        }


@cache
def _defaults() -> PPOConfig:
    unread = ("data.train_files=none", "data.val_files=none", "actor_rollout_ref.model.path=none")
    return composed("ppo", list(unread), rules=False).config


@cache
def rows() -> list[Row]:
    data = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    found = []
    for table in data["steps"]:
        for name, published in table["rows"].items():
            for policy, devices, samples, mean, server_tp, layout, seconds, *more in published:
                found.append(
                    Row(
                        table["release"],
                        table["hardware"],
                        data["models"][name],
                        name,
                        None if policy == "on" else policy,
                        devices,
                        samples,
                        mean,
                        server_tp,
                        tuple(layout),
                        seconds,
                        **(more[0] if more else {}),
                    )
                )
    return found


def errors(chosen: Sequence[Row], hardware: Mapping[str, Hardware] = HARDWARE) -> np.ndarray:
    """Predicted / published - 1 of each row."""
    return np.array([row.predicted(hardware[row.hardware]).total / row.seconds - 1 for row in chosen])


def rank_correlation(chosen: Sequence[Row]) -> float:
    """Spearman's, of predicted and published seconds."""
    predicted = [row.predicted(HARDWARE[row.hardware]).total for row in chosen]
    ranks = [np.argsort(np.argsort(values)) for values in (predicted, [row.seconds for row in chosen])]
    return float(np.corrcoef(np.stack(ranks))[0, 1])


def fit(chosen: Sequence[Row]) -> dict[str, float]:
    """The constants with the least sum of absolute log errors, each moved in turn over ever smaller steps.

    From where they are, and from the middle of their ranges.
    """

    def loss(values: Mapping[str, float]) -> float:
        hardware = {name: replace(HARDWARE[name], **values) for name in {row.hardware for row in chosen}}
        return float(np.abs(np.log1p(errors(chosen, hardware))).sum())

    starts = [
        {name: getattr(HARDWARE["h100"], name) for name in FITTED},
        {name: math.sqrt(low * high) for name, (low, high) in FITTED.items()},
    ]
    return min((_descended(start, loss) for start in starts), key=loss)


def _descended(values: dict[str, float], loss: Callable[[Mapping[str, float]], float]) -> dict[str, float]:
    best, factor = loss(values), 2.0
    while factor > 1.01:
        moved = False
        for name, (low, high) in FITTED.items():
            for times in (factor, 1 / factor):
                tried = values | {name: min(high, max(low, values[name] * times))}
                if (reached := loss(tried)) < best - 1e-9:
                    values, best, moved = tried, reached, True
        factor = factor if moved else math.sqrt(factor)
    return values


def table(chosen: Sequence[Row]) -> str:
    """The rows as a table of a page; a star marks those that constants were fitted to."""
    names = ("release", "devices", "model", "samples", "published, s", "predicted, s", "error")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in chosen:
        predicted = row.predicted(HARDWARE[row.hardware]).total
        hardware = f"{row.devices} {row.hardware.upper()}{f' {row.quantization}' if row.quantization else ''}"
        policy = "new" if row.policy is None else f"{row.policy} old"
        error = f"{100 * (predicted / row.seconds - 1):+.0f} %"
        cells = (row.release, hardware, row.model_name, policy, f"{row.seconds:g}", f"{predicted:.1f}", error)
        lines.append(f"| {' | '.join(map(str, cells))}{' *' if row.is_fitted else ''} |")
    return "\n".join(lines)


def phases(chosen: Sequence[Row]) -> str:
    """The predicted seconds of each row's phases."""
    lines = []
    for row in chosen:
        step = row.predicted(HARDWARE[row.hardware])
        parts = ", ".join(f"{phase} {step.seconds(phase):.1f}" for phase in step.phases)
        lines.append(f"{row.release} {row.run}: {parts}; most: {step.limit}")
    return "\n".join(lines)


def summary() -> str:
    parts = []
    for name, chosen in (("never fitted", held_out()), ("fitted", [row for row in rows() if row.is_fitted])):
        error = np.abs(errors(chosen))
        parts.append(
            f"{len(chosen)} rows {name}: median error {100 * median(error):.0f} %, rank correlation "
            f"{rank_correlation(chosen):.2f}, largest error {100 * error.max():.0f} %"
        )
    return "\n".join(parts)


def held_out() -> list[Row]:
    return [row for row in rows() if not row.is_fitted]


# The task of the growth picture: prompts, samples of each, tokens of a prompt, of a response at most and on average.
TASK = {"data.train_batch_size": 512, f"{ACTOR}.ppo_mini_batch_size": 512, f"{ROLLOUT}.n": 16}
TASK |= {"data.max_prompt_length": 1024, "data.max_response_length": 8192, f"{ROLLOUT}.max_num_seqs": 1024}
TASK |= {f"{ACTOR}.max_tokens_per_micro_batch": 16384, f"{ROLLOUT}.gpu_memory_utilization": 0.85}
TASK |= {f"{ACTOR}.megatron.{part}_offload": True for part in ("param", "grad", "optimizer")}
TASK |= {"trainer.n_gpus_per_node": 8, "trainer.save_freq": 0}
GROWING = ("qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")


def growth(name: str) -> list[tuple[int, float]]:
    """(devices, tokens/s of each) of the best layout of a model, on as many H100s as it fits and has samples for."""
    shape = ModelShape.from_config(json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8")))
    shapes, config, found = {"actor": shape, "ref": shape}, changed(_defaults(), TASK), []
    for devices in (2**power for power in range(3, 13)):
        best = tuned(config, shapes, devices, HARDWARE["h100"], device_memory_bytes("h100")).best
        if best:
            found.append((devices, best[0].step.tokens_per_s))
            print(f"{name}, {devices}: {best[0].step.tokens_per_s:.0f} tokens/s, {best[0].step.limit}", flush=True)
    return found


def draw() -> None:
    """Writes docs/images/planned.svg and docs/images/growth.svg."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "plan", "svg.fonttype": "none", "font.size": 10}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 5))
    ends = [40, 700]
    axes.fill_between(ends, [0.75 * end for end in ends], [1.25 * end for end in ends], color="#e3f0fb", label="25 %")
    axes.plot(ends, ends, color="#7b8794", linewidth=1)
    for name, color, chosen in (
        ("never fitted", "#c2410c", held_out()),
        ("fitted", "#9aa5b1", [row for row in rows() if row.is_fitted]),
    ):
        predicted = [row.predicted(HARDWARE[row.hardware]).total for row in chosen]
        axes.scatter([row.seconds for row in chosen], predicted, s=22, color=color, label=name)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="published seconds", ylabel="predicted seconds")
    ticks = [50, 100, 200, 500]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False)
    _keep(figure, "planned")
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name in GROWING:
        points = growth(name)
        axes.plot([devices for devices, _ in points], [tokens for _, tokens in points], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="H100 devices", ylabel="tokens/s of each device")
    ticks = [2**power for power in range(3, 13)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(color="#f2f4f7")
    axes.legend(frameon=False)
    _keep(figure, "growth")


def _keep(figure: Any, name: str) -> None:
    figure.savefig(REPOSITORY / "docs" / "images" / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")


def write_page() -> None:
    """Puts the table and the summary between the marks of the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    assert begin and end, f"{PAGE}: no {MARKS}"
    PAGE.write_text(f"{before}{begin}\n{summary()}\n\n{table(rows())}\n{end}{after}", encoding="utf-8")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants again, and print them")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/planning.md")
    parser.add_argument("--draw", action="store_true", help="draw the pictures of that page; takes minutes")
    options = parser.parse_args(arguments)
    if options.fit:
        for name, value in fit([row for row in rows() if row.is_fitted]).items():
            print(f"{name} = {value:.3g}")
        return 0
    if options.draw:
        draw()
    if options.docs:
        write_page()
    print(table(rows()), phases(rows()), summary(), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
