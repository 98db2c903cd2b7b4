"""The check whether a run fits its devices, and the size of their memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scalerl.base.files import GIB
from scalerl.config import PPOConfig, SFTConfig
from scalerl.config.schema import RunConfig
from scalerl.config.value_checks import device_memory_bytes
from scalerl.extras.plan.plan import MemoryPlan, memory_plan
from scalerl.extras.plan.report import summary
from scalerl.extras.plan.suggest import fitting_changes
from scalerl.models import ModelShape


@dataclass(frozen=True)
class PlannedMemory:
    """The plan of a run, its summary as text, and a violation if the run does not fit its devices."""

    plan: MemoryPlan
    summary: str
    violations: list[str]


def plan_memory(cfg: PPOConfig | SFTConfig, shapes: Mapping[str, ModelShape], device: str) -> PlannedMemory:
    """Plans the memory of a run before it starts, on cuda or cpu.

    On GPUs, sets the KV cache of every replica of the policy as planned. Raises ValueError if a layout cannot hold its
    model.
    """
    plan, violations = checked_plan(cfg, shapes, known_memory(cfg.trainer, device), on_cpu=device == "cpu")
    if isinstance(cfg, PPOConfig) and device == "cuda":
        with_kv_cache(cfg, plan)
    return PlannedMemory(plan, summary(plan), violations)


def known_memory(trainer: RunConfig, device: str) -> int | None:
    """The bytes of memory of a device: trainer.device_memory, else what this machine's GPU reports; None if unknown.

    device: cuda or cpu.
    """
    if trainer.device_memory is not None:
        return device_memory_bytes(trainer.device_memory)
    if device == "cuda":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_properties(0).total_memory
    return None


def checked_plan(
    cfg: PPOConfig | SFTConfig, shapes: Mapping[str, ModelShape], memory_bytes: int | None, *, on_cpu: bool = False
) -> tuple[MemoryPlan, list[str]]:
    """The plan of a run, and one violation if it does not fit: what is too large, and the nearest settings that fit.

    Raises ValueError if a layout cannot hold its model.
    """
    plan = memory_plan(cfg, shapes, memory_bytes=memory_bytes, on_cpu=on_cpu)
    problems = plan.problems()
    if not problems:
        return plan, []
    assert memory_bytes is not None, "nothing is too large for memory that is not known"
    changes = fitting_changes(cfg, shapes, memory_bytes=memory_bytes, on_cpu=on_cpu)
    advice = (
        "set " + "\n  or ".join(changes)
        if changes
        else "no change of recompute, micro-batches, layout or offload makes it fit; take more or larger devices"
    )
    title = f"trainer.device_memory = {memory_bytes / GIB:.1f} GiB a device: the run does not fit (scalerl plan):"
    return plan, ["\n".join([title, *(f"  {problem}" for problem in problems), advice])]


def with_kv_cache(cfg: PPOConfig, plan: MemoryPlan) -> None:
    """Gives every replica the KV cache of the plan; else a restart while a trainer holds memory would make it smaller.

    A number that the user has set stays; on a CPU, or if the device's memory is not known, nothing changes.
    """
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.kv_cache_tokens is None and plan.server is not None and plan.server.kv_tokens:
        rollout.kv_cache_tokens = plan.server.kv_tokens
