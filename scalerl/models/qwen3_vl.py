"""The family of Qwen3-VL (dense): Qwen3's language model, and a tower of which some blocks feed its first layers too.

DeepStack: arXiv 2406.04334.
"""

from __future__ import annotations

from dataclasses import replace

from scalerl.models import qwen3
from scalerl.models.rules import linear, released
from scalerl.models.table import Tower, TowerTensor


def _norm(name: str, dim: str) -> tuple[TowerTensor, TowerTensor]:
    return (f"{name}.weight", (dim,)), (f"{name}.bias", (dim,))


def _merger(path: str, normed: str) -> tuple[TowerTensor, ...]:
    return (
        *_norm(f"{path}norm", normed),
        *linear(f"{path}linear_fc1", "tower_merged", "tower_merged"),
        *linear(f"{path}linear_fc2", "tower_out", "tower_merged"),
    )


TOWER = Tower(
    prefix="model.visual.",
    transformers_class="qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel",
    tensors=(
        ("patch_embed.proj.weight", ("tower", "channels", "frames", "patch", "patch")),
        ("patch_embed.proj.bias", ("tower",)),
        ("pos_embed.weight", ("tower_positions", "tower")),
        *_merger("merger.", "tower"),
    ),
    block=(
        *_norm("norm1", "tower"),
        *_norm("norm2", "tower"),
        *linear("attn.qkv", "tower_qkv", "tower"),
        *linear("attn.proj", "tower", "tower"),
        *linear("mlp.linear_fc1", "tower_ffn", "tower"),
        *linear("mlp.linear_fc2", "tower", "tower_ffn"),
    ),
    deepstack=_merger("", "tower_merged"),
    defaults={
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": (8, 16, 24),
    },
    image_token_id=151655,
    sections=(24, 20, 20),
    interleaved=True,
)

FAMILY = replace(
    released(qwen3.FAMILY, "qwen3_vl", TOWER),
    defaults={**qwen3.FAMILY.defaults, "rope_theta": 5e5, "max_position_embeddings": 128000},
)
