"""What a run took in memory and seconds, beside what `scalerl plan` says of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from scalerl.base.files import GIB
from scalerl.config import ConfigError, PPOConfig, compose
from scalerl.config.save import RESOLVED_CONFIG
from scalerl.extras.report.charts import Figure, bars
from scalerl.extras.report.run_files import RunFiles

if TYPE_CHECKING:
    from scalerl.extras.plan.plan import MemoryPlan
    from scalerl.models import ModelShape

_LENGTHS = (("prompt_length", "mean"), ("response_length", "mean"), ("response_length", "max"))
# Part of a step -> phases of the plan that it has.
PHASES_OF = {
    "old_log_prob": ("actor log-probs",),
    "ref": ("ref log-probs",),
    "values": ("critic values",),
    "reward_model": ("reward_model values",),
    "update_critic": ("critic update", "critic step"),
    "update_actor": ("actor update", "actor step"),
    "update_weights": ("weight sync",),
    "save_checkpoint": ("save",),
}
# Parts of the plan that are not in the allocator of a trainer's rank, which is what a run measures.
_OF_OTHERS = ("process", "server weights", "KV cache", "server's rest", "delta net states", "server adapters")


@dataclass(frozen=True)
class Planned:
    """The plan of a run.  memory_gib: phase -> of a trainer's rank.  why_not: why there is no plan.

    seconds: part of a step -> predicted; {}: for a device whose rates are not known.  device: of these rates.
    """

    memory_gib: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    device: str = ""
    why_not: str = ""


def planned(run: RunFiles) -> Planned:
    """Plans the run by its saved configuration and the config.json of its models, as far as these are there."""
    from scalerl.extras.plan.check import checked_plan, known_memory
    from scalerl.extras.plan.shapes import shapes_of

    if not run.config:
        return Planned(why_not=f"{run.directory} has no {RESOLVED_CONFIG}")
    kind = "ppo" if "actor_rollout_ref" in run.config else "sft"
    at = ["--config-dir", str(run.directory.absolute()), "--config-name", RESOLVED_CONFIG.partition(".")[0]]
    try:
        cfg = compose(kind, at, rules=False)
        shapes = shapes_of(cfg)
        on_cpu = cfg.trainer.device == "cpu"
        plan, _ = checked_plan(cfg, shapes, known_memory(cfg.trainer, "cpu"), on_cpu=on_cpu)
        device, seconds = predicted(run, cfg, shapes, plan) if isinstance(cfg, PPOConfig) else ("", {})
    except (ValueError, OSError) as error:
        said = error.violations[0] if isinstance(error, ConfigError) else str(error)
        return Planned(why_not=said.strip().splitlines()[0])
    memory: dict[str, float] = {}
    for of_device in plan.devices:
        for phase in of_device.phases:
            own = sum(size for name, size in phase.parts.items() if not name.endswith(_OF_OTHERS))
            memory[phase.name] = max(memory.get(phase.name, 0.0), own / GIB)
    return Planned(memory, seconds, device)


def predicted(
    run: RunFiles, cfg: PPOConfig, shapes: Mapping[str, ModelShape], plan: MemoryPlan
) -> tuple[str, dict[str, float]]:
    """The device, and the predicted seconds of each part of a step of the lengths that the run's samples had.

    The rates are those that `scalerl plan --calibrate` has written for the run, else those of the named device.
    """
    from scalerl.extras.plan.calibrate import HARDWARE_FILE
    from scalerl.extras.plan.hardware import hardware_of, read_hardware
    from scalerl.extras.plan.lengths import Lengths
    from scalerl.extras.plan.seconds import step_seconds

    own = run.directory / HARDWARE_FILE
    # Of a device that is not known neither the rates are, nor the KV cache.
    is_known = own.is_file() or (cfg.trainer.device != "cpu" and bool(plan.concurrency))
    lengths = [run.series(f"{name}/{kind}")[1] for name, kind in _LENGTHS]
    if plan.server is None or not is_known or not all(lengths):
        return "", {}
    hardware = read_hardware(own) if own.is_file() else hardware_of(cfg.trainer.device_memory)
    prompt, mean, longest = map(median, lengths)
    step = step_seconds(cfg, shapes, plan.server, hardware, Lengths(prompt, mean, max(1, round(longest))))
    return hardware.name, {name: step.seconds(name) for name in step.phases}


def memory_figure(run: RunFiles, plan: Planned) -> Figure | None:
    """The most memory of each part of a step, measured and planned; None where nothing was measured."""
    prefix = "perf/memory_peak_gb/"
    measured = {key.removeprefix(prefix): max(run.series(key)[1]) for key in run.keys(f"{prefix}*")}
    if not measured:
        return None
    shown = {name: measured[name] for name in (*PHASES_OF, *measured) if name in measured}
    named = {"measured": shown}
    of_plan = {
        name: max(plan.memory_gib[phase] for phase in PHASES_OF.get(name, ()) if phase in plan.memory_gib)
        for name in shown
        if any(phase in plan.memory_gib for phase in PHASES_OF.get(name, ()))
    }
    return bars("Most memory of a trainer's rank", "GiB", named | ({"planned": of_plan} if of_plan else {}))


def said_of_memory(run: RunFiles, plan: Planned) -> list[str]:
    """Why there is no plan to compare with, and what is measured on a CPU."""
    said = [f"There is no plan to compare with: {plan.why_not}"] if plan.why_not else []
    if run.value("trainer.device") == "cpu":
        said.append("On a CPU what is measured is the whole of a process; the plan counts the tensors in it.")
    return said


def seconds_figure(run: RunFiles, plan: Planned) -> Figure | None:
    """The seconds of each part of a step, measured (the median) and predicted; None where none are predicted."""
    medians = {name: median(run.series(f"timing_s/{name}")[1]) for name in plan.seconds if run.keys(f"timing_s/{name}")}
    if not medians:
        return None
    of_plan = {name: plan.seconds[name] for name in medians}
    return bars(
        f"Seconds of a step, and what is predicted of {plan.device}", "s", {"measured": medians, "planned": of_plan}
    )
