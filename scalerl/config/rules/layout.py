"""How the sizes of a layout must fit each other, the devices and the model."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from scalerl.config.pipeline_sizes import PipelineSizes
from scalerl.config.rules.base import divisors_text
from scalerl.config.schema import MegatronConfig, PPOConfig, SFTConfig

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class ModelSizes:
    """What of a model a layout divides, or its recompute; sizes of the whole model. num_experts 0: a dense model.

    ffn_hidden_size: of dense layers, 0 where every layer is a mixture.
    """

    num_attention_heads: int
    num_kv_heads: int
    num_layers: int
    ffn_hidden_size: int
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0
    shared_expert_ffn_hidden_size: int = 0
    latent_attention: bool = False


def world_size(cfg: PPOConfig | SFTConfig) -> int:
    """Devices of the trainer; on CPU, processes."""
    return cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node


def megatron_of(cfg: PPOConfig | SFTConfig) -> MegatronConfig:
    """The trained model's."""
    return cfg.megatron if isinstance(cfg, SFTConfig) else cfg.actor_rollout_ref.actor.megatron


def devices_per_model(megatron: MegatronConfig) -> int:
    """Devices of one data-parallel copy."""
    return megatron.tensor_model_parallel_size * megatron.context_parallel_size * megatron.pipeline_model_parallel_size


def dividing_sizes(megatron: MegatronConfig) -> list[str]:
    """Names of the sizes above 1 whose product is `devices_per_model`; one name at least."""
    names = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    return [name for name in names if getattr(megatron, name) > 1] or [names[0]]


def dp_size(cfg: PPOConfig | SFTConfig) -> int:
    """Data-parallel ranks; the layout must fit the world size."""
    return world_size(cfg) // devices_per_model(megatron_of(cfg))


def expert_tp_size(megatron: MegatronConfig) -> int:
    """expert_tensor_parallel_size with its default filled in."""
    return megatron.expert_tensor_parallel_size or megatron.tensor_model_parallel_size


def micro_batch_multiple(megatron: MegatronConfig) -> int:
    """Of a rank in a mini-batch: an interleaved pipeline works in rounds of as many micro-batches as it has stages."""
    return megatron.pipeline_model_parallel_size if (megatron.virtual_pipeline_model_parallel_size or 1) > 1 else 1


def alignment(*, tp_size: int, cp_size: int, sequence_parallel: bool) -> tuple[int, int]:
    """What the tokens of a packed sequence, and of a whole micro-batch, are a multiple of.

    Context parallelism cuts every sequence into 2 * cp_size pieces; sequence parallelism splits the tokens of each of
    its ranks over tp_size.
    """
    sequence = 2 * cp_size if cp_size > 1 else 1
    return sequence, math.lcm(sequence, cp_size * tp_size if sequence_parallel else 1)


def aligning_keys(prefix: str) -> tuple[str, str]:
    """Keys that `tokens_per_device` reads."""
    return f"{prefix}.tensor_model_parallel_size", f"{prefix}.context_parallel_size"


def tokens_per_device(num_tokens: int, megatron: MegatronConfig) -> int:
    """That a micro-batch of one sequence of num_tokens takes on each device that shares it."""
    cp_size = megatron.context_parallel_size
    sequence, micro_batch = alignment(
        tp_size=megatron.tensor_model_parallel_size, cp_size=cp_size, sequence_parallel=megatron.sequence_parallel
    )
    padded = -(-num_tokens // sequence) * sequence
    return -(-padded // micro_batch) * micro_batch // cp_size


def layout_violations(
    sizes: ModelSizes,
    *,
    megatron: MegatronConfig,
    world_size: int,
    rollout_tp: int | None = None,
    prefix: str = f"{ACTOR}.megatron",
) -> list[str]:
    """What of a layout the model does not allow. world_size counts devices.

    Args:
        rollout_tp: devices of one rollout replica; None where nothing is generated.
        prefix: key of the MegatronConfig, for the messages.
    """
    tp_size = megatron.tensor_model_parallel_size
    widths = {
        "attention heads": sizes.num_attention_heads,
        "key/value heads": sizes.num_kv_heads,
    }
    if sizes.ffn_hidden_size:
        widths["feed-forward size"] = sizes.ffn_hidden_size
    if sizes.shared_expert_ffn_hidden_size:
        widths["width of the shared experts"] = sizes.shared_expert_ffn_hidden_size
    found = list(_indivisible(f"{prefix}.tensor_model_parallel_size", tp_size, widths))
    found += world_violations(megatron, world_size, prefix)
    found += _context(sizes, megatron, prefix)
    found += PipelineSizes.of(megatron).violations(sizes.num_layers, prefix)
    found += _experts(sizes, megatron, prefix)
    if rollout_tp is not None:
        split = {name: size for name, size in widths.items() if name != "key/value heads"}
        found += server_violations(f"{ROLLOUT}.tensor_model_parallel_size", rollout_tp, split, sizes.num_kv_heads)
    return found


def server_violations(key: str, tp_size: int, widths: dict[str, int], num_kv_heads: int) -> list[str]:
    """What of a model a rollout server cannot cut over tp_size devices. widths: name -> size, to be cut evenly."""
    found = list(_indivisible(key, tp_size, widths))
    # The server repeats key/value heads when there are fewer than devices.
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        found.append(
            f"{key} = {tp_size}: must divide the model's {num_kv_heads} key/value heads or be a multiple of them; set "
            f"one of {divisors_text(num_kv_heads)}"
        )
    return found


def world_violations(megatron: MegatronConfig, world_size: int, prefix: str) -> Iterator[str]:
    """The devices against the sizes, whatever the model."""
    used = dividing_sizes(megatron)
    model = devices_per_model(megatron)
    if world_size % model:
        product = f" = {model}" if len(used) > 1 else ""
        yield (
            f"{' x '.join(f'{prefix}.{name}' for name in used)} = "
            f"{' x '.join(str(getattr(megatron, name)) for name in used)}{product}: must divide the {world_size} "
            f"devices; set sizes whose product is one of {divisors_text(world_size)}"
        )
        return
    stage = world_size // megatron.pipeline_model_parallel_size
    experts = megatron.expert_model_parallel_size * expert_tp_size(megatron)
    if stage % experts:
        yield (
            f"{prefix}.expert_model_parallel_size x expert_tensor_parallel_size = "
            f"{megatron.expert_model_parallel_size} x {expert_tp_size(megatron)} = {experts}: must divide the {stage} "
            f"devices of a pipeline stage; set sizes whose product is one of {divisors_text(stage)}"
        )


def _context(sizes: ModelSizes, megatron: MegatronConfig, prefix: str) -> Iterator[str]:
    """Ranks that swap tokens for heads inside attention must divide the heads."""
    cp_size, tp_size, kind = megatron.context_parallel_size, megatron.tensor_model_parallel_size, megatron.cp_comm_type
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


def _experts(sizes: ModelSizes, megatron: MegatronConfig, prefix: str) -> Iterator[str]:
    ep_size, etp_size = megatron.expert_model_parallel_size, expert_tp_size(megatron)
    if not sizes.num_experts:
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if (getattr(megatron, name) or 1) > 1:
                yield f"{prefix}.{name} = {getattr(megatron, name)}: the model has no experts; leave it out"
        return
    yield from _indivisible(f"{prefix}.expert_model_parallel_size", ep_size, {"experts": sizes.num_experts})
    yield from _indivisible(
        f"{prefix}.expert_tensor_parallel_size", etp_size, {"width of an expert": sizes.moe_ffn_hidden_size}
    )
    if megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        yield (
            f"{prefix}.sequence_parallel = false: a mixture of experts with {prefix}.tensor_model_parallel_size = "
            f"{megatron.tensor_model_parallel_size} needs it (each rank routes its own tokens); set it to true"
        )


def _indivisible(key: str, parts: int, sizes: dict[str, int]) -> Iterator[str]:
    allowed = functools.reduce(math.gcd, sizes.values())
    wrong = [f"{size} {name}" for name, size in sizes.items() if size % parts]
    if wrong:
        yield f"{key} = {parts}: must divide the model's {', '.join(wrong)}; set one of {divisors_text(allowed)}"
