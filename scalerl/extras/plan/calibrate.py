"""The rates of a device as finished runs show them: they are set so that the plan's phases take the runs' seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from scalerl.config import PPOConfig, composed
from scalerl.config.save import RESOLVED_CONFIG, read_resolved
from scalerl.errors import UserError
from scalerl.extras.plan.check import known_memory
from scalerl.extras.plan.hardware import Hardware, hardware_of, write_hardware
from scalerl.extras.plan.lengths import Lengths
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
# Phases, and the rates behind them.
_GROUPS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("old_log_prob", "ref", "values", "update_critic", "update_actor"),
        ("dense_frac", "layer_s", "sequence_s", "message_s", "network_frac"),
    ),
    (("gen",), ("memory_frac", "round_frac", "round_layer_s", "token_s", "request_s")),
    (("update_weights",), ("sync_frac", "sync_s")),
)
# A phase of a run scatters by a tenth; an assumed rate is right to a factor of e.
_SCATTER = 0.1
# The groups are fitted in turn, since each waits a little for the others' rates.
_ROUNDS = 3
# Assumed of a CPU core, whose network is its memory; only its rate of matrix products is measured.
_CPU: dict[str, Any] = {
    "dense_frac": 0.45,
    "round_frac": 0.3,
    "memory_bandwidth": 1e10,
    "node_bandwidth": 2e9,
    "network_bandwidth": 1e10,
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
# Metrics of which a run must have values; of a CPU the last one says how fast it is.
_LENGTHS, _MFU = ("prompt_length/mean", "response_length/mean", "response_length/max"), "perf/mfu/actor"
_NEEDED = (*_LENGTHS, "timing_s/gen", "timing_s/update_actor")
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
    def read(cls, run_dir: Path, overrides: Sequence[str] = ()) -> MeasuredRun:
        """Reads trainer.default_local_dir of a run.  overrides: key=value, in the place of what its config.yaml has.

        Raises UserError for a directory without a run, and for a run of too few steps, of another command or without
        the metrics that are needed, such as one with trainer.custom_fit.
        """
        config_file, metrics_file = run_dir / RESOLVED_CONFIG, run_dir / METRICS
        missing = [file.name for file in (config_file, metrics_file) if not file.is_file()]
        give = "give trainer.default_local_dir of a run of scalerl train with trainer.logger=[file]"
        if missing:
            raise UserError(f"--calibrate {run_dir}: has no {' and no '.join(missing)}; {give}")
        if "actor_rollout_ref" not in (read_resolved(config_file) or {}):
            raise UserError(f"--calibrate {run_dir}: is no run of scalerl train by its {RESOLVED_CONFIG}; {give}")
        rows = read_metrics(run_dir).values()
        steps = [row for row in rows if "timing_s/step" in row][_WARM_UP:]
        if not steps:
            raise UserError(f"--calibrate {run_dir}: needs {_WARM_UP + 1} steps or more; train longer")
        config = composed(
            "ppo", ["--config-dir", str(run_dir.absolute()), "--config-name", "config", *overrides], rules=False
        ).config
        on_cpu = config.trainer.device == "cpu"
        needed = [*_NEEDED, _MFU] if on_cpu else _NEEDED
        if unknown := [key for key in needed if not any(key in row for row in steps)]:
            later = f"has no {' and no '.join(unknown)} after its first {_WARM_UP} steps in {METRICS}"
            raise UserError(f"--calibrate {run_dir}: {later}; train longer, without trainer.custom_fit")
        shapes = shapes_of(config)
        plan = memory_plan(config, shapes, memory_bytes=known_memory(config.trainer, "cpu"), on_cpu=on_cpu)
        assert plan.server is not None

        def middle(name: str) -> float:
            return median(data[name] for data in steps if name in data)

        names = [phase for group, _ in _GROUPS for phase in group]
        # Of a step in which the critic warms up alone there is no update of the actor.
        phases = [phase for phase in names if any(f"timing_s/{phase}" in row for row in steps)]
        prompt, mean, longest = map(middle, _LENGTHS)
        return cls(
            config,
            shapes,
            plan.server,
            Lengths(prompt, mean, max(1, round(longest))),
            {phase: middle(f"timing_s/{phase}") for phase in phases},
            mfu=middle(_MFU) if any(_MFU in row for row in steps) else 0.0,
        )

    @property
    def device(self) -> str:
        """The name of its kind of device."""
        trainer = self.config.trainer
        return "CPU" if trainer.device == "cpu" else hardware_of(trainer.device_memory).name

    def predicted(self, hardware: Hardware) -> StepSeconds:
        return step_seconds(self.config, self.shapes, self.server, hardware, self.lengths)


def calibrate(runs: Mapping[Path, MeasuredRun]) -> str:
    """Writes the rates of the runs' device to HARDWARE_FILE of each directory; returns what became of the phases.

    Raises UserError for runs on different devices.
    """
    if len({run.device for run in runs.values()}) > 1:
        said = ", ".join(f"{directory} is on {run.device}" for directory, run in runs.items())
        raise UserError(f"--calibrate: {said}; give runs on one kind of device")
    measured = list(runs.values())
    start, hardware = _assumed(measured), rates(measured)
    files = [directory / HARDWARE_FILE for directory in runs]
    for file in files:
        write_hardware(hardware, file)
    both = [(name, value, getattr(hardware, name)) for name, value in vars(start).items()]
    changed = [
        f"  {name:<20}{before:>12.3g} -> {now:.3g}"
        for name, before, now in both
        if now != before and abs(now / before - 1) > 0.005
    ]
    return "\n".join([comparisons(runs, hardware), "", *changed, f"written: {', '.join(map(str, files))}"])


def rates(runs: Sequence[MeasuredRun]) -> Hardware:
    """The rates of the device of the runs."""
    return fitted(runs, _assumed(runs))


def _assumed(runs: Sequence[MeasuredRun]) -> Hardware:
    trainer = runs[0].config.trainer
    return _cpu(runs) if trainer.device == "cpu" else hardware_of(trainer.device_memory)


def comparisons(runs: Mapping[Path, MeasuredRun], hardware: Hardware) -> str:
    """The `comparison` of each run; of several below its directory."""
    texts = [(f"{directory}\n" if len(runs) > 1 else "") + comparison(run, hardware) for directory, run in runs.items()]
    return "\n\n".join(texts)


def comparison(run: MeasuredRun, hardware: Hardware) -> str:
    """The phases of a run beside those of the plan."""
    step = run.predicted(hardware)
    lines = [f"{'phase':<16}{'measured, s':>12}{'predicted, s':>14}{'error':>8}"]
    for phase, seconds in run.seconds.items():
        predicted = step.seconds(phase)
        lines.append(f"{phase:<16}{seconds:>12.3g}{predicted:>14.3g}{100 * (predicted / seconds - 1):>+7.0f}%")
    return "\n".join(lines)


def fitted(runs: Sequence[MeasuredRun], assumed: Hardware) -> Hardware:
    """The rates with which the plan's phases take the seconds of the runs, as near as these rates can.

    Rates of one group keep the assumed ratios as far as the runs say nothing of them. One run cannot say how a phase
    divides into seconds for each FLOP or byte and seconds for each operation or message; a small and a large model
    together can.
    """
    hardware = assumed
    for _ in range(_ROUNDS):
        for phases, names in _GROUPS:
            hardware = _fitted_group(runs, phases, names, hardware, assumed)
    return hardware


def _fitted_group(
    runs: Sequence[MeasuredRun], phases: Sequence[str], names: Sequence[str], hardware: Hardware, assumed: Hardware
) -> Hardware:
    """The rates of one group fitted to its phases.  names: in `Hardware`, of a dense model."""
    own = dict.fromkeys(_rate_of(run, name) for run in runs for name in names)
    # What a device does not wait for is 0.
    names = [name for name in own if getattr(assumed, name)]
    start, prior = (np.log([getattr(of, name) for name in names]) for of in (hardware, assumed))
    # More of a share is faster, more seconds are slower.
    slow = np.array([-1 if name.endswith("_frac") else 1 for name in names])

    def at(logs: np.ndarray) -> Hardware:
        return replace(hardware, **dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def errors(logs: np.ndarray) -> np.ndarray:
        steps = [(run, run.predicted(at(logs))) for run in runs]
        both = [(run.seconds.get(phase), step.seconds(phase)) for run, step in steps for phase in phases]
        off = [math.log(predicted / measured) for measured, predicted in both if measured and predicted]
        slower = slow * (logs - prior)
        return np.append(np.divide(off, _SCATTER), slower - slower.mean())

    return at(least_squares(errors, start, xtol=1e-4).x)


def _rate_of(run: MeasuredRun, rate: str) -> str:
    """The name of the rate for the model and the servers of the run."""
    if rate == "sync_frac" and not run.config.actor_rollout_ref.hybrid_engine:
        return "broadcast_frac"
    return _OF_MIXTURES.get(rate, rate) if run.shapes["actor"].num_experts else rate


def _cpu(runs: Sequence[MeasuredRun]) -> Hardware:
    """A rank's cores: their peak as a run has measured it for its MFU; all other rates are assumed."""
    return Hardware("CPU", max(map(_peak_flops, runs)), **_CPU)


def _peak_flops(run: MeasuredRun) -> float:
    actor, rollout = run.config.actor_rollout_ref.actor, run.config.actor_rollout_ref.rollout
    samples = run.config.data.train_batch_size * rollout.n * actor.ppo_epochs
    lengths = [round(length) for length in run.lengths.samples]
    flops = samples * flops_shape(run.shapes["actor"]).train(lengths) / len(lengths)
    return flops / (run.mfu * run.seconds["update_actor"] * run.config.trainer.num_devices)
