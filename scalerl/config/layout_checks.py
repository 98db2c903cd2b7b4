"""Checks of a model's sizes against its layout, the devices of a rollout server and activation recompute."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalerl.config.layout import LayoutSizes
from scalerl.config.names import ACTOR, FLASH_ATTENTION_IMPLS, ROLLOUT
from scalerl.config.suggestions import divisors_text, nearest_multiples

if TYPE_CHECKING:
    from scalerl.config.schema import MegatronConfig
    from scalerl.config.schema.devices import DevicesConfig, ResourcePoolConfig


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a whole model that a layout or activation recompute must divide.

    attention_sinks, biased_experts: as gpt-oss has them; scalerl's own attention and experts compute them alone.
    num_experts: 0 for a dense model.  ffn_hidden_size: of dense layers, 0 where every layer is a mixture.
    linear_num_key_heads: of gated delta nets, 0 for a model without them.
    deepstack_layers: the first layers, which are fed by the vision tower too.
    """

    num_attention_heads: int
    num_kv_heads: int
    num_layers: int
    ffn_hidden_size: int
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0
    shared_expert_ffn_hidden_size: int = 0
    latent_attention: bool = False
    linear_num_key_heads: int = 0
    attention_sinks: bool = False
    biased_experts: bool = False
    deepstack_layers: int = 0


def layout_violations(
    sizes: ModelSizes,
    *,
    megatron: MegatronConfig,
    world_size: int,
    rollout_tp: int | None = None,
    prefix: str = f"{ACTOR}.megatron",
) -> list[str]:
    """Lists why the model cannot be spread over devices that hold whole copies of it; empty where it can.

    Args:
        world_size: devices of the trainer.
        rollout_tp: devices of one rollout replica; None where nothing is generated.
        prefix: key of the MegatronConfig, for the messages.
    """
    layout = LayoutSizes.of(megatron, world_size)
    widths = {
        "attention heads": sizes.num_attention_heads,
        "key/value heads": sizes.num_kv_heads,
    }
    if sizes.ffn_hidden_size:
        widths["feed-forward size"] = sizes.ffn_hidden_size
    if sizes.shared_expert_ffn_hidden_size:
        widths["width of the shared experts"] = sizes.shared_expert_ffn_hidden_size
    violations = list(_indivisible(f"{prefix}.tensor_model_parallel_size", layout.tp_size, widths))
    violations += _context(sizes, layout, megatron, prefix)
    violations += _delta_nets(sizes, layout, megatron, prefix)
    of_pipeline = layout.pipeline_violations(sizes.num_layers, prefix)
    violations += of_pipeline or _deepstack(sizes, layout, prefix)
    violations += _experts(sizes, layout, megatron, prefix)
    violations += _without_transformer_engine(sizes, megatron, prefix)
    if rollout_tp is not None:
        if sizes.linear_num_key_heads:
            widths["key heads of the gated delta nets"] = sizes.linear_num_key_heads
        split = {name: size for name, size in widths.items() if name != "key/value heads"}
        violations += server_violations(f"{ROLLOUT}.tensor_model_parallel_size", rollout_tp, split, sizes.num_kv_heads)
    return violations


def server_violations(key: str, tp_size: int, widths: dict[str, int], num_kv_heads: int) -> list[str]:
    """Lists why a rollout server cannot split the model over tp_size devices; empty where it can.

    key: config key of tp_size, for the messages.  widths: name -> size, which must be split evenly.
    """
    violations = list(_indivisible(key, tp_size, widths))
    # The server repeats key/value heads when there are fewer than devices.
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        violations.append(
            f"{key} = {tp_size}: must divide the model's {num_kv_heads} key/value heads or be a multiple of them; set "
            f"one of {divisors_text(num_kv_heads)}"
        )
    return violations


def whole_copies(megatron: MegatronConfig, pool: DevicesConfig | ResourcePoolConfig, *keys: str) -> Iterator[str]:
    """Yields the violation of devices that hold no whole copies of a model.

    keys: the dotted sections of `megatron` and of `pool`.
    """
    layout, (section, devices) = LayoutSizes.of(megatron, pool.num_devices), keys
    if layout.world_size % layout.copy_size:
        # With several nodes, the devices per node that work are the multiples of this.
        unit = layout.copy_size // math.gcd(layout.copy_size, pool.nnodes)
        # The keys above 1 whose product is the devices of one copy of the model; at least one key.
        names = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
        above_1 = [name for name in names if getattr(megatron, name) > 1] or names[:1]
        used = " x ".join(f"{section}.{name}" for name in above_1)
        yield (
            f"{devices}.nnodes x {devices}.n_gpus_per_node = {pool.nnodes} x {pool.n_gpus_per_node} = "
            f"{layout.world_size}: must be a multiple of {used} = {layout.copy_size}; set {devices}.n_gpus_per_node="
            f"{nearest_multiples(pool.n_gpus_per_node, unit)}, or sizes whose product divides {layout.world_size}"
        )


def _context(sizes: ModelSizes, layout: LayoutSizes, megatron: MegatronConfig, prefix: str) -> Iterator[str]:
    """Checks that the ranks that swap tokens for heads inside attention divide the heads."""
    cp_size, tp_size, kind = layout.cp_size, layout.tp_size, megatron.cp_comm_type
    if sizes.num_attention_heads % tp_size:
        return
    heads, kv_heads = sizes.num_attention_heads // tp_size, sizes.num_kv_heads // tp_size
    key = f"{prefix}.context_parallel_size"
    if kind is None and heads % cp_size:
        yield (
            f"{key} = {cp_size}: must divide the {heads} attention heads of a tensor-parallel rank, which it shares "
            f"out inside attention; set one of {divisors_text(heads)}"
        )
    if sizes.num_kv_heads % tp_size:
        return
    # Transformer Engine does not repeat key/value heads where there are fewer than ranks.
    common = math.gcd(heads, kv_heads)
    both = f"the {heads} attention heads and the {kv_heads} key/value heads of a tensor-parallel rank"
    if kind == "a2a" and common % cp_size:
        yield (
            f"{key} = {cp_size}: must divide {both}, which {prefix}.cp_comm_type = a2a shares out; set one of "
            f"{divisors_text(common)}, or {prefix}.cp_comm_type=p2p, which shares out none"
        )
    hierarchy = megatron.hierarchical_context_parallel_sizes
    if kind == "a2a+p2p" and hierarchy is not None and common % hierarchy[0]:
        yield (
            f"{prefix}.hierarchical_context_parallel_sizes = [{hierarchy[0]},{hierarchy[1]}]: the first number must "
            f"divide {both}, which that many ranks share out; set one of {divisors_text(common)} in its place, or "
            f"{prefix}.cp_comm_type=p2p"
        )


def _delta_nets(sizes: ModelSizes, layout: LayoutSizes, megatron: MegatronConfig, prefix: str) -> Iterator[str]:
    """Checks that the ranks of a layer share out the key heads of gated delta nets."""
    if not sizes.linear_num_key_heads:
        return
    what = "key heads of the gated delta nets"
    yield from _indivisible(f"{prefix}.tensor_model_parallel_size", layout.tp_size, {what: sizes.linear_num_key_heads})
    if sizes.linear_num_key_heads % layout.tp_size:
        return
    heads, key = sizes.linear_num_key_heads // layout.tp_size, f"{prefix}.context_parallel_size"
    if heads % layout.cp_size:
        yield (
            f"{key} = {layout.cp_size}: must divide the {heads} {what} of a tensor-parallel rank, which it shares out "
            f"inside these; set one of {divisors_text(heads)}"
        )
    if megatron.cp_comm_type is not None:
        yield (
            f"{prefix}.cp_comm_type = {megatron.cp_comm_type}: is of attention alone, and this model has gated delta "
            f"nets; set {prefix}.cp_comm_type=null"
        )


def _deepstack(sizes: ModelSizes, layout: LayoutSizes, prefix: str) -> list[str]:
    """Refuses a pipeline whose first stage, which has the vision tower, has fewer layers than the tower feeds."""
    here, needed = layout.chunks(sizes.num_layers)[0], sizes.deepstack_layers
    if here >= needed:
        return []
    # Of the keys that make it so small, the ones to leave out.
    keys = {
        "virtual_pipeline_model_parallel_size": layout.vpp_size if layout.vpp_size > 1 else None,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
    }
    others = "".join(f", {prefix}.{name}=null" for name, value in keys.items() if value is not None)
    key = f"{prefix}.pipeline_model_parallel_size"
    return [
        f"{key} = {layout.pp_size}: leaves {here} layers to the first chunk of the first stage, and the vision tower "
        f"feeds the model's first {needed}; set {key}=1{others}, or give the first chunk {needed} layers"
    ]


def _experts(sizes: ModelSizes, layout: LayoutSizes, megatron: MegatronConfig, prefix: str) -> Iterator[str]:
    if not sizes.num_experts:
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if (getattr(megatron, name) or 1) > 1:
                yield f"{prefix}.{name} = {getattr(megatron, name)}: the model has no experts; leave it out"
        return
    if layout.stage_size % layout.experts_size:
        yield (
            f"{prefix}.expert_model_parallel_size x expert_tensor_parallel_size = "
            f"{layout.ep_size} x {layout.etp_size} = {layout.experts_size}: must divide the {layout.stage_size} "
            f"devices of a pipeline stage; set sizes whose product is one of {divisors_text(layout.stage_size)}"
        )
    yield from _indivisible(f"{prefix}.expert_model_parallel_size", layout.ep_size, {"experts": sizes.num_experts})
    yield from _indivisible(
        f"{prefix}.expert_tensor_parallel_size", layout.etp_size, {"width of an expert": sizes.moe_ffn_hidden_size}
    )
    if layout.tp_size > 1 and not megatron.sequence_parallel:
        yield (
            f"{prefix}.sequence_parallel = false: a mixture of experts with {prefix}.tensor_model_parallel_size = "
            f"{layout.tp_size} needs it (each rank routes its own tokens); set it to true"
        )


def _without_transformer_engine(sizes: ModelSizes, megatron: MegatronConfig, prefix: str) -> Iterator[str]:
    """Refuses Transformer Engine's modules for what they are not known to compute."""
    if sizes.attention_sinks and megatron.cp_comm_type is not None:
        yield (
            f"{prefix}.cp_comm_type = {megatron.cp_comm_type}: takes Transformer Engine's attention, and the model has "
            f"attention sinks; set {prefix}.cp_comm_type=null"
        )
    if sizes.biased_experts and megatron.moe_experts_impl == "transformer_engine":
        yield (
            f"{prefix}.moe_experts_impl = transformer_engine: the model's experts have biases and another activation; "
            f"set {prefix}.moe_experts_impl=torch"
        )


def _indivisible(key: str, parts: int, sizes: dict[str, int]) -> Iterator[str]:
    allowed = functools.reduce(math.gcd, sizes.values())
    wrong = [f"{size} {name}" for name, size in sizes.items() if size % parts]
    if wrong:
        yield f"{key} = {parts}: must divide the model's {', '.join(wrong)}; set one of {divisors_text(allowed)}"


def flash_attention_violations(impl: str | None, megatron: MegatronConfig, section: str) -> Iterator[str]:
    """Yields the violation of trainer.flash_attention_impl where the trained model has another attention."""
    if impl not in FLASH_ATTENTION_IMPLS:
        return
    subject = f"trainer.flash_attention_impl = {impl}: has no effect when"
    if megatron.cp_comm_type is not None:
        yield (
            f"{subject} {section}.cp_comm_type = {megatron.cp_comm_type}, which takes Transformer Engine's attention; "
            f"set {section}.cp_comm_type=null, or trainer.flash_attention_impl=null"
        )
    elif megatron.dtype == "float32":
        yield (
            f"{subject} {section}.dtype = float32, as it computes in 16 bits; set {section}.dtype=bfloat16, or "
            "trainer.flash_attention_impl=null"
        )


def recompute_violations(sizes: ModelSizes, megatron: MegatronConfig, *, prefix: str) -> list[str]:
    """Lists why the model, on a valid layout, cannot recompute activations in this way; empty where it can.

    prefix: key of the MegatronConfig, for the messages.
    """
    if megatron.recompute_granularity == "selective":
        return list(_recompute_modules(sizes, megatron, prefix))
    if megatron.recompute_granularity == "full":
        return list(_recompute_layers(sizes.num_layers, megatron, prefix))
    return []


def _recompute_modules(sizes: ModelSizes, megatron: MegatronConfig, prefix: str) -> Iterator[str]:
    has = {
        "moe": sizes.num_experts > 0,
        "shared_experts": sizes.shared_expert_ffn_hidden_size > 0,
        "mla_up_proj": sizes.latent_attention,
    }
    missing = [name for name in megatron.recompute_modules if not has.get(name, True)]
    if missing:
        rest = [name for name in megatron.recompute_modules if name not in missing] or ["core_attn"]
        yield (
            f"{prefix}.recompute_modules = [{','.join(megatron.recompute_modules)}]: the model has no "
            f"{' and no '.join(missing)}; set {prefix}.recompute_modules=[{','.join(rest)}]"
        )


def _recompute_layers(num_layers: int, megatron: MegatronConfig, prefix: str) -> Iterator[str]:
    per_chunk, wanted = set(LayoutSizes.of(megatron).chunks(num_layers)), megatron.recompute_num_layers
    key = f"{prefix}.recompute_num_layers = {wanted}"
    # megatron walks a chunk in steps of this size and would look for layers after its last.
    wrong = sorted(size for size in per_chunk if size % wanted)
    if megatron.recompute_method == "uniform" and wrong:
        yield (
            f"{key}: with {prefix}.recompute_method = uniform it must divide the layers of every model chunk, "
            f"which has {' or '.join(map(str, sorted(per_chunk)))}; set one of {divisors_text(math.gcd(*per_chunk))}"
        )
    if megatron.recompute_method == "block" and wanted > max(per_chunk):
        yield (
            f"{key}: a model chunk has at most {max(per_chunk)} layers; set {prefix}.recompute_num_layers="
            f"{max(per_chunk)} or less"
        )
