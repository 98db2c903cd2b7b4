"""Rules of sections that several configs have: a layout on its devices, an optimizer, Megatron, resuming."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from scalerl.config.rules.attention import attention_violations
from scalerl.config.rules.base import Rule, nearest_multiples, value_at
from scalerl.config.rules.layout import devices_per_model, dividing_sizes, world_size
from scalerl.config.schema import MegatronConfig
from scalerl.config.value_checks import show


def world_rule(megatron: str) -> Rule:
    sizes = tuple(
        f"{megatron}.{name}"
        for name in ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    )

    def check(cfg: Any) -> Iterator[str]:
        world, model = world_size(cfg), devices_per_model(value_at(cfg, megatron))
        if world % model:
            # With several nodes, the devices per node that work are the multiples of this.
            unit = model // math.gcd(model, cfg.trainer.nnodes)
            used = " x ".join(f"{megatron}.{name}" for name in dividing_sizes(value_at(cfg, megatron)))
            yield (
                f"trainer.nnodes x trainer.n_gpus_per_node = {cfg.trainer.nnodes} x {cfg.trainer.n_gpus_per_node} = "
                f"{world}: must be a multiple of {used} = {model}; set trainer.n_gpus_per_node="
                f"{nearest_multiples(cfg.trainer.n_gpus_per_node, unit)}, or sizes whose product divides {world}"
            )

    chunks = f"{megatron}.virtual_pipeline_model_parallel_size"
    return Rule((*sizes, chunks, "trainer.nnodes", "trainer.n_gpus_per_node"), check)


def lr_rules(optim: str) -> list[Rule]:
    style, decay, warmup = f"{optim}.lr_decay_style", f"{optim}.lr_decay_steps", f"{optim}.lr_warmup_steps"
    lr, min_lr = f"{optim}.lr", f"{optim}.min_lr"

    def decay_given(cfg: Any) -> Iterator[str]:
        if value_at(cfg, style) != "constant" and value_at(cfg, decay) is None:
            yield (
                f"{decay} = null: needed when {style} = {value_at(cfg, style)}; set it to the optimizer updates of the "
                f"run, or {style}=constant"
            )
        if value_at(cfg, style) == "constant" and value_at(cfg, decay) is not None:
            yield (
                f"{decay} = {value_at(cfg, decay)}: has no effect when {style} = constant; set {style}=linear or "
                f"cosine, or {decay}=null"
            )

    def warmup_before_decay(cfg: Any) -> Iterator[str]:
        if value_at(cfg, decay) is not None and value_at(cfg, warmup) >= value_at(cfg, decay):
            yield (
                f"{warmup} = {value_at(cfg, warmup)}: must be below {decay} = {value_at(cfg, decay)}; set at most "
                f"{warmup}={value_at(cfg, decay) - 1}"
            )

    def floor_below_peak(cfg: Any) -> Iterator[str]:
        if value_at(cfg, min_lr) > value_at(cfg, lr):
            yield (
                f"{min_lr} = {value_at(cfg, min_lr)}: must be at most {lr} = {value_at(cfg, lr)}; set "
                f"{min_lr}={value_at(cfg, lr)} or less"
            )

    return [
        Rule((style, decay), decay_given),
        Rule((decay, warmup), warmup_before_decay),
        Rule((lr, min_lr), floor_below_peak),
    ]


def megatron_rules(megatron: str, unless: str | None = None) -> list[Rule]:
    """What megatron-core allows together, whatever the model. unless: another section, whose equal has been judged."""
    granularity, method = f"{megatron}.recompute_granularity", f"{megatron}.recompute_method"
    num_layers, modules = f"{megatron}.recompute_num_layers", f"{megatron}.recompute_modules"
    initial, lowest = f"{megatron}.initial_loss_scale", f"{megatron}.min_loss_scale"

    def recompute(cfg: Any) -> Iterator[str]:
        kind = value_at(cfg, granularity)
        if kind == "full":
            if value_at(cfg, method) is None:
                yield f"{method} = null: needed when {granularity} = full; set {method}=uniform or block"
            if value_at(cfg, num_layers) is None:
                yield (
                    f"{num_layers} = null: needed when {granularity} = full; set {num_layers}=1, which saves most, or "
                    "more"
                )
        else:
            for key in (method, num_layers):
                if value_at(cfg, key) is not None:
                    yield (
                        f"{key} = {value_at(cfg, key)}: only for {granularity} = full, which is {show(kind)}; set "
                        f"{granularity}=full, or {key}=null"
                    )
        if kind == "selective" and not value_at(cfg, modules):
            yield f"{modules} = []: {granularity} = selective needs one at least; set for example {modules}=[core_attn]"
        if kind != "selective" and value_at(cfg, modules) != MegatronConfig().recompute_modules:
            yield (
                f"{modules} = {show(value_at(cfg, modules))}: has no effect when {granularity} = {show(kind)}; set "
                f"{granularity}=selective, or leave {modules} out"
            )

    def loss_scale(cfg: Any) -> Iterator[str]:
        if value_at(cfg, lowest) > value_at(cfg, initial):
            yield (
                f"{lowest} = {value_at(cfg, lowest):g}: must be at most {initial} = {value_at(cfg, initial):g}; set "
                f"{lowest}={value_at(cfg, initial):g} or less"
            )

    def attention(cfg: Any) -> Iterator[str]:
        yield from attention_violations(value_at(cfg, megatron), prefix=megatron)

    def judged(check: Callable[[Any], Iterator[str]], *keys: str) -> Rule:
        def unless_equal(cfg: Any) -> Iterator[str]:
            if unless is None or value_at(cfg, megatron) != value_at(cfg, unless):
                yield from check(cfg)

        return Rule(keys, unless_equal)

    return [
        judged(recompute, granularity, method, num_layers, modules),
        judged(loss_scale, initial, lowest),
        judged(
            attention,
            f"{megatron}.cp_comm_type",
            f"{megatron}.hierarchical_context_parallel_sizes",
            f"{megatron}.context_parallel_size",
            f"{megatron}.dtype",
        ),
    ]


def _resume(cfg: Any) -> Iterator[str]:
    mode, path = cfg.trainer.resume_mode, cfg.trainer.resume_from_path
    if mode == "resume_path" and path is None:
        yield (
            "trainer.resume_from_path = null: needed when trainer.resume_mode = resume_path; set it to a "
            "global_step_N directory, or trainer.resume_mode=auto"
        )
    if mode != "resume_path" and path is not None:
        yield (
            f"trainer.resume_from_path = {path}: has no effect when trainer.resume_mode = {mode}; set "
            "trainer.resume_mode=resume_path, or trainer.resume_from_path=null"
        )


RESUME = Rule(("trainer.resume_mode", "trainer.resume_from_path"), _resume)
