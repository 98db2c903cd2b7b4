"""Rules of the devices that a model is spread over, and of what its attention asks of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from scalerl.config.layout_checks import dividing_sizes
from scalerl.config.layout_sizes import trained_layout, trained_megatron
from scalerl.config.model_specs import model_roles
from scalerl.config.rules.base import Rule, rule, value_at
from scalerl.config.schema import FLASH_ATTENTION_IMPLS, PPOConfig, SFTConfig
from scalerl.config.sections import ACTOR, trained_layout_keys
from scalerl.config.suggestions import nearest_multiples
from scalerl.config.transformer_engine import (
    expert_violations,
    transformer_engine_version,
    transformer_engine_violations,
)


def trained_layout_rule(megatron: str) -> Rule:
    """Makes the rule that the trainer's devices hold whole copies of the trained model."""

    @rule(*trained_layout_keys(megatron))
    def whole_copies(cfg: Any) -> Iterator[str]:
        layout, trainer = trained_layout(cfg), cfg.trainer
        if layout.world_size % layout.copy_size:
            # With several nodes, the devices per node that work are the multiples of this.
            unit = layout.copy_size // math.gcd(layout.copy_size, trainer.nnodes)
            used = " x ".join(f"{megatron}.{name}" for name in dividing_sizes(value_at(cfg, megatron)))
            yield (
                f"trainer.nnodes x trainer.n_gpus_per_node = {trainer.nnodes} x {trainer.n_gpus_per_node} = "
                f"{layout.world_size}: must be a multiple of {used} = {layout.copy_size}; set trainer.n_gpus_per_node="
                f"{nearest_multiples(trainer.n_gpus_per_node, unit)}, or sizes whose product divides "
                f"{layout.world_size}"
            )

    return whole_copies


def flash_attention_rule(megatron: str) -> Rule:
    """Makes the rule that the trained model's attention is the one that trainer.flash_attention_impl is about."""
    kind, dtype = f"{megatron}.cp_comm_type", f"{megatron}.dtype"

    @rule("trainer.flash_attention_impl", kind, dtype)
    def is_called(cfg: Any) -> Iterator[str]:
        impl = cfg.trainer.flash_attention_impl
        if impl not in FLASH_ATTENTION_IMPLS:
            return
        what = f"trainer.flash_attention_impl = {impl}: has no effect when"
        if value_at(cfg, kind) is not None:
            yield (
                f"{what} {kind} = {value_at(cfg, kind)}, which takes Transformer Engine's attention; set {kind}=null, "
                "or trainer.flash_attention_impl=null"
            )
        elif value_at(cfg, dtype) == "float32":
            yield (
                f"{what} {dtype} = float32, as it computes in 16 bits; set {dtype}=bfloat16, or "
                "trainer.flash_attention_impl=null"
            )

    return is_called


def transformer_engine_rules(cfg: PPOConfig | SFTConfig, device: str) -> list[Rule]:
    """Makes the rules of attention and experts for the trained model, and for each role of the run that has others.

    device: cuda or cpu.
    """
    trained = "megatron" if isinstance(cfg, SFTConfig) else f"{ACTOR}.megatron"
    roles = [] if isinstance(cfg, SFTConfig) else model_roles(cfg)

    def sections(name: str) -> list[str]:
        usual = getattr(trained_megatron(cfg), name)
        return [trained, *(f"{role.section}.megatron" for role in roles if getattr(role.megatron, name) != usual)]

    def attention_rule(megatron: str) -> Rule:
        kind, cp_size = f"{megatron}.cp_comm_type", f"{megatron}.context_parallel_size"

        @rule(kind, cp_size)
        def runs_here(cfg: Any) -> Iterator[str]:
            yield from transformer_engine_violations(
                value_at(cfg, kind),
                value_at(cfg, cp_size),
                prefix=megatron,
                device=device,
                version=transformer_engine_version(),
            )

        return runs_here

    def experts_rule(megatron: str) -> Rule:
        impl = f"{megatron}.moe_experts_impl"

        @rule(impl)
        def runs_here(cfg: Any) -> Iterator[str]:
            yield from expert_violations(
                value_at(cfg, impl), prefix=megatron, device=device, version=transformer_engine_version()
            )

        return runs_here

    return [
        *map(attention_rule, sections("cp_comm_type")),
        *map(experts_rule, sections("moe_experts_impl")),
    ]
