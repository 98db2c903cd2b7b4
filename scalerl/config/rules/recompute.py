"""What a model and its layout allow of activation recompute. Rules between the keys alone: `validate.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scalerl.config.pipeline_sizes import PipelineSizes
from scalerl.config.rules.base import divisors_text
from scalerl.config.rules.layout import ModelSizes
from scalerl.config.schema import MegatronConfig


def recompute_violations(sizes: ModelSizes, megatron: MegatronConfig, *, prefix: str) -> list[str]:
    """For a layout that the model allows. prefix: key of the MegatronConfig, for the messages."""
    if megatron.recompute_granularity == "selective":
        return list(_modules(sizes, megatron, prefix))
    if megatron.recompute_granularity == "full":
        return list(_layers(sizes.num_layers, megatron, prefix))
    return []


def _modules(sizes: ModelSizes, megatron: MegatronConfig, prefix: str) -> Iterator[str]:
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


def _layers(num_layers: int, megatron: MegatronConfig, prefix: str) -> Iterator[str]:
    per_chunk, wanted = set(PipelineSizes.of(megatron).chunks(num_layers)), megatron.recompute_num_layers
    assert wanted is not None, "a method needs it"
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
