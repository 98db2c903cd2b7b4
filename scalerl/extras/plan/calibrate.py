"""The rates of a device as a finished run shows them: they are set so that the plan's phases take the run's seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from scalerl.config import PPOConfig, composed
from scalerl.config.save import RESOLVED_CONFIG
from scalerl.errors import UserError
from scalerl.extras.plan.check import known_memory
from scalerl.extras.plan.hardware import Hardware, hardware_of, write_hardware
from scalerl.extras.plan.lengths import Lengths
from scalerl.extras.plan.passes import added
from scalerl.extras.plan.plan import memory_plan
from scalerl.extras.plan.seconds import StepSeconds, step_seconds
from scalerl.extras.plan.servers import ServerBytes
from scalerl.extras.plan.shapes import shapes_of
from scalerl.models import ModelShape
from scalerl.models.flops import flops_shape
from scalerl.tracking.jsonl import METRICS, read_metrics

# The file of rates, in the run's directory.
HARDWARE_FILE = "hardware.yaml"
# The first steps compile, allocate and fill caches.
_WARM_UP = 2
_ROUNDS = 30
# Phases that are made equal together, with what they wait for -> the rate behind it, and whether more of it is faster.
# The part that takes most of these sets its rate; the others stay as they are.
_GROUPS: tuple[tuple[tuple[str, ...], dict[str, tuple[str, bool]]], ...] = (
    (
        ("old_log_prob", "ref", "values", "update_critic", "update_actor"),
        {
            "products": ("dense_frac", True),
            "least of layers": ("layer_s", False),
            "sequences": ("sequence_s", False),
            "messages": ("message_s", False),
        },
    ),
    (
        ("gen",),
        {
            "weights and KV cache": ("memory_frac", True),
            "products": ("round_frac", True),
            "least of a round": ("round_layer_s", False),
            "server's process": ("token_s", False),
            "requests": ("request_s", False),
        },
    ),
    (("update_weights",), {"weights": ("sync_frac", True), "calls": ("sync_s", False)}),
)
# Assumed of a CPU core; only its rate of matrix products is measured.
_CPU: dict[str, Any] = {
    "dense_frac": 0.45,
    "round_frac": 0.45,
    "memory_bandwidth": 1e10,
    "node_bandwidth": 2e9,
    "network_bandwidth": 2e9,
    "host_bandwidth": 1e10,
    "node_size": 64,
    "round_layer_s": 1e-3,
    "layer_s": 1e-3,
    "mixture_layer_s": 3e-3,
    "sequence_s": 2e-4,
    "sync_s": 3e-2,
    "message_s": 2e-4,
    "request_s": 1e-3,
}
_OF_MIXTURES = {"dense_frac": "mixture_frac", "layer_s": "mixture_layer_s"}


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run.

    seconds: the median of each phase's over its steps.  mfu: of the actor's updates; 0: not known.
    """

    config: PPOConfig
    shapes: Mapping[str, ModelShape]
    server: ServerBytes
    lengths: Lengths
    seconds: Mapping[str, float]
    mfu: float = 0.0

    @classmethod
    def read(cls, run_dir: Path) -> MeasuredRun:
        """Reads trainer.default_local_dir of a run.  Raises UserError where there is none, or one of too few steps."""
        config_file, metrics_file = run_dir / RESOLVED_CONFIG, run_dir / METRICS
        missing = [file.name for file in (config_file, metrics_file) if not file.is_file()]
        if missing:
            raise UserError(
                f"--calibrate {run_dir}: has no {' and no '.join(missing)}; give trainer.default_local_dir of a run of "
                "scalerl train with trainer.logger=[file]"
            )
        rows = read_metrics(run_dir).values()
        steps = [row for row in rows if "timing_s/step" in row][_WARM_UP:]
        if not steps:
            raise UserError(f"--calibrate {run_dir}: needs {_WARM_UP + 1} steps or more; train longer")
        config = composed(
            "ppo", ["--config-dir", str(run_dir.absolute()), "--config-name", "config"], rules=False
        ).config
        shapes, on_cpu = shapes_of(config), config.trainer.device == "cpu"
        plan = memory_plan(config, shapes, memory_bytes=known_memory(config.trainer, "cpu"), on_cpu=on_cpu)
        assert plan.server is not None

        def middle(name: str) -> float:
            return median(data[name] for data in steps if name in data)

        phases = [phase for group, _ in _GROUPS for phase in group if f"timing_s/{phase}" in steps[0]]
        prompt, mean, longest = (middle(f"{name}_length/{kind}") for name, kind in _LENGTHS)
        return cls(
            config,
            shapes,
            plan.server,
            Lengths(prompt, mean, max(1, round(longest))),
            {phase: middle(f"timing_s/{phase}") for phase in phases},
            mfu=middle("perf/mfu/actor") if "perf/mfu/actor" in steps[0] else 0.0,
        )

    def predicted(self, hardware: Hardware) -> StepSeconds:
        return step_seconds(self.config, self.shapes, self.server, hardware, self.lengths)


_LENGTHS = (("prompt", "mean"), ("response", "mean"), ("response", "max"))


def calibrate(run_dir: Path) -> str:
    """Writes the rates of the device of a run to HARDWARE_FILE of its directory; returns what became of the phases."""
    run = MeasuredRun.read(run_dir)
    start, hardware = _assumed(run), rates(run)
    write_hardware(hardware, run_dir / HARDWARE_FILE)
    changed = [
        f"  {name:<20}{getattr(start, name):>12.3g} -> {getattr(hardware, name):.3g}"
        for name in vars(start)
        if getattr(start, name) != getattr(hardware, name)
    ]
    return "\n".join([comparison(run, hardware), "", *changed, f"written: {run_dir / HARDWARE_FILE}"])


def rates(run: MeasuredRun) -> Hardware:
    """The rates of the device of a run."""
    return fitted(run, _assumed(run))


def _assumed(run: MeasuredRun) -> Hardware:
    trainer = run.config.trainer
    return _cpu(run) if trainer.device == "cpu" else hardware_of(trainer.device_memory)


def comparison(run: MeasuredRun, hardware: Hardware) -> str:
    """The phases of a run beside those of the plan."""
    step = run.predicted(hardware)
    lines = [f"{'phase':<16}{'measured, s':>12}{'predicted, s':>14}{'error':>8}"]
    for phase, seconds in run.seconds.items():
        predicted = step.seconds(phase)
        lines.append(f"{phase:<16}{seconds:>12.3g}{predicted:>14.3g}{100 * (predicted / seconds - 1):>+7.0f}%")
    return "\n".join(lines)


def fitted(run: MeasuredRun, hardware: Hardware) -> Hardware:
    """The rates with which the plan's phases take the seconds of the run, as near as these rates can."""
    for _ in range(_ROUNDS):
        for phases, rates in _GROUPS:
            step = run.predicted(hardware)
            parts = added(*(step.phases.get(phase, {}) for phase in phases if phase in run.seconds))
            known = [name for name in rates if parts.get(name)]
            if not known:
                continue
            name = max(known, key=lambda part: parts[part])
            left_s = sum(run.seconds.get(phase, 0.0) for phase in phases) - sum(parts.values()) + parts[name]
            # A part may be smaller than the others leave room for, but is not nothing.
            times = max(left_s, parts[name] / 2) / parts[name]
            rate, more_is_faster = rates[name]
            rate = _rate_of(run, rate)
            value = getattr(hardware, rate)
            hardware = replace(hardware, **{rate: value / times if more_is_faster else value * times})
    return hardware


def _rate_of(run: MeasuredRun, rate: str) -> str:
    """The name of the rate for the model and the servers of the run."""
    if rate == "sync_frac" and not run.config.actor_rollout_ref.hybrid_engine:
        return "broadcast_frac"
    return _OF_MIXTURES.get(rate, rate) if run.shapes["actor"].num_experts else rate


def _cpu(run: MeasuredRun) -> Hardware:
    """A rank's cores: their peak as the run has measured it for its MFU; all other rates are assumed."""
    actor, rollout = run.config.actor_rollout_ref.actor, run.config.actor_rollout_ref.rollout
    samples = run.config.data.train_batch_size * rollout.n * actor.ppo_epochs
    lengths = [round(length) for length in run.lengths.samples]
    flops = samples * flops_shape(run.shapes["actor"]).train(lengths) / len(lengths)
    peak = flops / (run.mfu * run.seconds["update_actor"] * run.config.trainer.num_devices)
    return Hardware("CPU", peak, **_CPU)
