"""The family of Qwen3.5 and 3.6, dense: gated delta nets, and gated attention in some layers; and its vision tower.

Gated Delta Networks: arXiv 2412.06464. A delta net's tensors are joined by key head: the rows of queries, keys, values,
output gate (z), update strength (b) and decay (a) that belong to it.
"""

from __future__ import annotations

from dataclasses import replace

from scalerl.models import qwen3_vl
from scalerl.models.rules import K_NORM, PROJ, Q_NORM, QKV_WEIGHT, decoder_family, released
from scalerl.models.table import ParamPattern

_MEGATRON = "decoder.layers.{i}.self_attention"
_HF = "model.layers.{i}.linear_attn"
_CHANNELS = ("delta_key", "delta_key", "delta_value")

IN_PROJ = ParamPattern(
    f"{_MEGATRON}.in_proj.weight",
    tuple(f"{_HF}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
    "delta",
    (("delta_qkv", "hidden"), ("delta_value", "hidden"), ("delta_heads", "hidden"), ("delta_heads", "hidden")),
    "linear",
    sections=(_CHANNELS, ("delta_value",), ("delta_heads",), ("delta_heads",)),
)
# What all delta nets have but the input projection, which comes first.
DELTA_NET = (
    ParamPattern(
        f"{_MEGATRON}.conv_weight",
        (f"{_HF}.conv1d.weight",),
        "delta",
        (("delta_qkv", "one", "delta_taps"),),
        "linear",
        sections=(_CHANNELS,),
    ),
    # SGLang stores it in float32, whatever the model's dtype.
    ParamPattern(f"{_MEGATRON}.A_log", (f"{_HF}.A_log",), "column", (("delta_heads",),), "linear", keeps_float32=True),
    ParamPattern(f"{_MEGATRON}.dt_bias", (f"{_HF}.dt_bias",), "column", (("delta_heads",),), "linear"),
    ParamPattern(f"{_MEGATRON}.norm_weight", (f"{_HF}.norm.weight",), "replicated", (("delta_head_dim",),), "linear"),
    ParamPattern(
        f"{_MEGATRON}.out_proj.weight", (f"{_HF}.out_proj.weight",), "row", (("hidden", "delta_value"),), "linear"
    ),
)
GATED_ATTENTION = (
    replace(QKV_WEIGHT, dims=(("q_gate", "hidden"), ("kv", "hidden"), ("kv", "hidden")), where="full"),
    *(replace(rule, where="full") for rule in (Q_NORM, K_NORM, PROJ)),
)
ATTENTION = (IN_PROJ, *DELTA_NET, *GATED_ATTENTION)
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}

FAMILY = decoder_family(
    "qwen3_5_text",
    qk_norm=True,
    defaults=DEFAULTS,
    refused=("attention_bias",),
    attention=ATTENTION,
    delta_net=True,
    untrained=("mtp.",),
)
# Qwen3-VL's, which feeds no layer of the language model.
TOWER = replace(
    qwen3_vl.TOWER,
    transformers_class="qwen3_5.modeling_qwen3_5.Qwen3_5VisionModel",
    deepstack=(),
    defaults={key: value for key, value in qwen3_vl.TOWER.defaults.items() if key != "deepstack_visual_indexes"},
    image_token_id=248056,
    sections=(11, 11, 10),
    is_optional=True,
)
# The released files.
RELEASED = released(FAMILY, "qwen3_5", TOWER)
