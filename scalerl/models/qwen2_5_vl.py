"""The family of Qwen2.5-VL: Qwen2's language model, and a tower most of whose blocks see a picture through windows."""

from __future__ import annotations

from dataclasses import replace

from scalerl.models import qwen2
from scalerl.models.rules import linear
from scalerl.models.table import Tower

TOWER = Tower(
    prefix="visual.",
    transformers_class="qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel",
    tensors=(
        ("patch_embed.proj.weight", ("tower", "channels", "frames", "patch", "patch")),
        ("merger.ln_q.weight", ("tower",)),
        *linear("merger.mlp.0", "tower_merged", "tower_merged"),
        *linear("merger.mlp.2", "tower_out", "tower_merged"),
    ),
    block=(
        ("norm1.weight", ("tower",)),
        ("norm2.weight", ("tower",)),
        *linear("attn.qkv", "tower_qkv", "tower"),
        *linear("attn.proj", "tower", "tower"),
        *linear("mlp.gate_proj", "tower_ffn", "tower"),
        *linear("mlp.up_proj", "tower_ffn", "tower"),
        *linear("mlp.down_proj", "tower", "tower_ffn"),
    ),
    defaults={
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": (7, 15, 23, 31),
    },
    image_token_id=151655,
    sections=(16, 24, 24),
    interleaved=False,
)

FAMILY = replace(
    qwen2.FAMILY,
    model_type="qwen2_5_vl",
    text_config="text_config",
    tower=TOWER,
    defaults={**qwen2.FAMILY.defaults, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
)
