"""Checks of the machine that a run starts on: its device, the probes, the attention of its ranks, and its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from scalerl.base.extras import extra
from scalerl.cluster.device import resolve_device
from scalerl.cluster.probes.gpu import start_violations, try_flash_attention
from scalerl.cluster.ray_session import one_machine_violations
from scalerl.config import PPOConfig, SFTConfig, model_roles
from scalerl.config.errors import ErrorCollector
from scalerl.config.pools import trained_megatron
from scalerl.config.schema import FLASH_ATTENTION_IMPLS, MegatronConfig, RunConfig
from scalerl.config.servers import traits_of
from scalerl.models import ModelShape

TORCHS_OWN = "torch's own"


def check_machine(errors: ErrorCollector, cfg: PPOConfig | SFTConfig) -> str:
    """The device of trainer.device on this machine, cuda or cpu; adds what would end a run on it at its start."""
    serves = isinstance(cfg, PPOConfig) and traits_of(cfg.actor_rollout_ref.rollout.name).compiles_kernels
    device = errors.attempt(lambda: resolve_device(cfg.trainer.device)) or "cpu"
    errors.violations.extend(one_machine_violations(cfg))
    errors.violations.extend(start_violations(device, serves=serves))
    return device


@dataclass(frozen=True)
class AttentionChoice:
    """The FlashAttention of a run, as far as its driver knows it.

    impls: with trainer.flash_attention_impl=auto those that ranks try, the first choice first; torch's own is the last.
    text: for the line about the devices; None where there is nothing to choose.
    """

    impls: tuple[str, ...] = ()
    text: str | None = None


def called_head_sizes(cfg: PPOConfig | SFTConfig, shapes: Mapping[str, ModelShape]) -> dict[str, int]:
    """The head size of each model whose attention trainer.flash_attention_impl is about, by the model's path.

    Empty where the trained model is none of them, or a model has attention sinks, which are tried with torch's own
    alone.  shapes: by role, of the models that could be read.
    """
    if any(shape.attention_sinks for shape in shapes.values()):
        return {}
    if isinstance(cfg, SFTConfig):
        models = {"actor": (cfg.model.path, cfg.megatron)}
    else:
        models = {role.name: (str(role.model_path), role.megatron) for role in model_roles(cfg)}
        models["actor"] = (cfg.actor_rollout_ref.model.path, cfg.actor_rollout_ref.actor.megatron)
    if not _is_called(trained_megatron(cfg)):
        return {}
    called = {role: path for role, (path, megatron) in models.items() if _is_called(megatron)}
    return {path: shapes[role].head_dim for role, path in called.items() if role in shapes}


def _is_called(megatron: MegatronConfig) -> bool:
    """Whether the attention is torch's in 16 bits: neither Transformer Engine's nor that of float32."""
    return megatron.cp_comm_type is None and megatron.dtype != "float32"


def choose_attention(
    errors: ErrorCollector, trainer: RunConfig, head_sizes: Mapping[str, int], device: str, *, runs_here: bool
) -> AttentionChoice:
    """Chooses by trainer.flash_attention_impl; adds an error for one that is asked for by name and cannot be had.

    head_sizes: of `called_head_sizes`.  device: cuda or cpu.  runs_here: on this machine, so that it is tried on it.
    """
    from scalerl.parallel.flash_attention import head_size_refusal

    def refusals_of_heads(impl: str) -> list[str]:
        refusals = (head_size_refusal(impl, size, path) for path, size in head_sizes.items())
        return [refusal.error(impl) for refusal in refusals if refusal is not None]

    wanted, tries, sizes = trainer.flash_attention_impl, runs_here and device == "cuda", set(head_sizes.values())
    if wanted in FLASH_ATTENTION_IMPLS:
        errors.violations.extend(refusals_of_heads(wanted))
        # On a CPU a rule of the configuration refuses it.
        if tries and (refusal := try_flash_attention(wanted, head_sizes=sizes)[wanted]) is not None:
            errors.violations.append(refusal.error(wanted))
        return AttentionChoice(text=f"{wanted} (trainer.flash_attention_impl)")
    if wanted is None or not (tries and head_sizes):
        return AttentionChoice()
    allowed = [impl for impl in FLASH_ATTENTION_IMPLS if not refusals_of_heads(impl)]
    refusals = try_flash_attention(*allowed, head_sizes=sizes)
    impls = tuple(impl for impl, refusal in refusals.items() if refusal is None)
    # Of what nothing can be done about, as the GPU is another one, a start says nothing.
    told = [(impl, refusal) for impl, refusal in refusals.items() if refusal is not None and not refusal.by_gpu]
    why = "".join(f"; {impl}: {refusal.reason}" for impl, refusal in told)
    text = impls[0] if impls else TORCHS_OWN
    return AttentionChoice(impls, f"{text} (trainer.flash_attention_impl=auto{'' if impls else why})")


class PlannedMemory(Protocol):
    """What the memory plan says of a run: its summary as text, and a violation if the run does not fit its devices."""

    @property
    def summary(self) -> str: ...
    @property
    def violations(self) -> list[str]: ...


# (configuration, role -> shape, cuda or cpu) -> the plan.
PlanMemory = Callable[[PPOConfig | SFTConfig, Mapping[str, ModelShape], str], PlannedMemory]


def check_memory(
    errors: ErrorCollector, cfg: PPOConfig | SFTConfig, shapes: Mapping[str, ModelShape], device: str
) -> PlannedMemory | None:
    """Plans the memory of a run that has no other error, and adds an error if it does not fit its devices.

    None for a run that trains an adapter, which the plan does not know. On GPUs, sets the KV cache of every replica of
    the policy as planned.
    """
    wanted = 1 + (len(model_roles(cfg)) if isinstance(cfg, PPOConfig) else 0)
    if errors.violations or len(shapes) < wanted or any(shape.adapter for shape in shapes.values()):
        return None
    plan_memory: PlanMemory | None = extra("plan_memory")
    planned = None if plan_memory is None else errors.attempt(lambda: plan_memory(cfg, shapes, device))
    if planned is not None:
        errors.violations.extend(planned.violations)
    return planned
