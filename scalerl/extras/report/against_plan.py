"""What a run took in memory and seconds, beside what `scalerl plan` says of its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from scalerl.base.files import GIB
from scalerl.config import PPOConfig, compose
from scalerl.config.save import RESOLVED_CONFIG
from scalerl.extras.report.charts import Figure, bars
from scalerl.extras.report.run_files import RunFiles

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
    """The plan of a run.  memory_gib: phase -> of a trainer's rank.  step_s: predicted; None: it is not.

    why_not: why there is no plan.
    """

    memory_gib: dict[str, float]
    step_s: float | None = None
    why_not: str = ""


def planned(run: RunFiles) -> Planned:
    """Plans the run by its saved configuration and the config.json of its models, as far as these are there."""
    from scalerl.extras.plan.check import checked_plan, known_memory
    from scalerl.extras.plan.command import shapes_of
    from scalerl.extras.plan.seconds import predicted_seconds

    kind = "ppo" if "actor_rollout_ref" in run.config else "sft"
    at = ["--config-dir", str(run.directory.absolute()), "--config-name", RESOLVED_CONFIG.partition(".")[0]]
    try:
        cfg = compose(kind, at, rules=False)
        on_cpu = cfg.trainer.device == "cpu"
        shapes = shapes_of(cfg)
        plan, _ = checked_plan(cfg, shapes, known_memory(cfg.trainer, "cpu"), on_cpu=on_cpu)
        has_seconds = isinstance(cfg, PPOConfig) and not on_cpu and plan.concurrency
        step_s = predicted_seconds(cfg, shapes, plan) if isinstance(cfg, PPOConfig) and has_seconds else None
    except (ValueError, OSError) as error:
        return Planned({}, why_not=str(error).strip().splitlines()[0])
    memory: dict[str, float] = {}
    for device in plan.devices:
        for phase in device.phases:
            own = sum(size for name, size in phase.parts.items() if not name.endswith(_OF_OTHERS))
            memory[phase.name] = max(memory.get(phase.name, 0.0), own / GIB)
    return Planned(memory, step_s)


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


def said_of_seconds(run: RunFiles, plan: Planned) -> list[str]:
    """The seconds of a step, measured and predicted."""
    if plan.step_s is None or not run.trained:
        return []
    took = median(run.steps[step]["timing_s/step"] for step in run.trained)
    return [f"A step took {took:.1f} s (median); {plan.step_s:.1f} s are predicted on H100s."]
