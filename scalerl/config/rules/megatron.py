"""Rules of a `megatron` section: what megatron-core allows together, whatever the model and the devices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from scalerl.config.rules.base import Rule, rule, value_at
from scalerl.config.schema import MegatronConfig
from scalerl.config.suggestions import divisors
from scalerl.config.value_checks import show


def megatron_rules(megatron: str, unless: str | None = None) -> list[Rule]:
    """Makes the rules of one `megatron` section.  unless: a section that is judged alone while both are equal."""
    granularity, modules = f"{megatron}.recompute_granularity", f"{megatron}.recompute_modules"
    method, num_layers = f"{megatron}.recompute_method", f"{megatron}.recompute_num_layers"
    initial, lowest = f"{megatron}.initial_loss_scale", f"{megatron}.min_loss_scale"
    kind, cp_size = f"{megatron}.cp_comm_type", f"{megatron}.context_parallel_size"
    hierarchy, dtype = f"{megatron}.hierarchical_context_parallel_sizes", f"{megatron}.dtype"

    def is_judged(cfg: Any) -> bool:
        return unless is None or value_at(cfg, megatron) != value_at(cfg, unless)

    @rule(granularity, method, num_layers, modules)
    def recompute(cfg: Any) -> Iterator[str]:
        if not is_judged(cfg):
            return
        wanted, default = value_at(cfg, granularity), MegatronConfig()
        if wanted == "selective" and not value_at(cfg, modules):
            yield f"{modules} = []: {granularity} = selective needs one at least; set for example {modules}=[core_attn]"
        for key, needed, usual in (
            (method, "full", default.recompute_method),
            (num_layers, "full", default.recompute_num_layers),
            (modules, "selective", default.recompute_modules),
        ):
            if wanted != needed and value_at(cfg, key) != usual:
                yield (
                    f"{key} = {show(value_at(cfg, key))}: has no effect when {granularity} = {show(wanted)}; set "
                    f"{granularity}={needed}, or leave {key} out"
                )

    @rule(initial, lowest)
    def loss_scale(cfg: Any) -> Iterator[str]:
        if is_judged(cfg) and value_at(cfg, lowest) > value_at(cfg, initial):
            yield (
                f"{lowest} = {value_at(cfg, lowest):g}: must be at most {initial} = {value_at(cfg, initial):g}; set "
                f"{lowest}={value_at(cfg, initial):g} or less"
            )

    @rule(kind, hierarchy, cp_size, dtype)
    def attention(cfg: Any) -> Iterator[str]:
        if is_judged(cfg):
            yield from _attention(value_at(cfg, megatron), megatron)

    @rule(f"{megatron}.use_distributed_optimizer", f"{megatron}.override_ddp_config")
    def late_gather(cfg: Any) -> Iterator[str]:
        section = value_at(cfg, megatron)
        if (
            is_judged(cfg)
            and section.override_ddp_config.get("overlap_param_gather")
            and not (section.use_distributed_optimizer)
        ):
            yield (
                f"{megatron}.override_ddp_config.overlap_param_gather = true: only with "
                f"{megatron}.use_distributed_optimizer = true, whose ranks gather parameters; set "
                f"{megatron}.use_distributed_optimizer=true, or leave it out"
            )

    return [recompute, loss_scale, attention, late_gather]


def _attention(megatron: MegatronConfig, section: str) -> Iterator[str]:
    kind, cp_size = megatron.cp_comm_type, megatron.context_parallel_size
    sizes = megatron.hierarchical_context_parallel_sizes
    key = f"{section}.hierarchical_context_parallel_sizes"
    if kind != "a2a+p2p" and sizes is not None:
        yield (
            f"{key} = {show(sizes)}: only for cp_comm_type = a2a+p2p, which is {show(kind)}; set "
            f"{section}.cp_comm_type=a2a+p2p and {section}.context_parallel_size={math.prod(sizes)}, or {key}=null"
        )
    if kind == "a2a+p2p" and (sizes is None or math.prod(sizes) != cp_size):
        pairs = [f"[{size},{cp_size // size}]" for size in divisors(cp_size) if 1 < size < cp_size]
        remedy = f"set {key}={' or '.join(pairs or ['[2,2]'])}"
        if not pairs:
            remedy += f" and {section}.context_parallel_size=4"
        remedy += f", or {section}.cp_comm_type=p2p, which needs none"
        yield (
            f"{key} = {show(sizes)}: {section}.cp_comm_type = a2a+p2p needs two sizes above 1 whose product is "
            f"{section}.context_parallel_size = {cp_size}; {remedy}"
        )
    if kind is not None and megatron.dtype == "float32":
        yield (
            f"{section}.cp_comm_type = {kind}: Transformer Engine's attention computes in 16 bits, and {section}.dtype "
            f"= float32; set {section}.dtype=bfloat16, or {section}.cp_comm_type=null"
        )
