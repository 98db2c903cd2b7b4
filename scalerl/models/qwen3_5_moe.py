"""The family of Qwen3.5 and 3.6 with experts in every layer: Qwen3.5's layers, and a shared expert with a gate."""

from __future__ import annotations

from dataclasses import replace

from scalerl.models.mixture import Mixture
from scalerl.models.qwen3_5 import ATTENTION, DEFAULTS, TOWER
from scalerl.models.rules import decoder_family, experts, mlp, released, router
from scalerl.models.table import ParamPattern

MIXTURE_RULES = (
    router("mlp.gate"),
    *mlp("mlp.shared_experts", "mlp.shared_expert", "shared_ffn", where="mixture"),
    ParamPattern(
        "decoder.layers.{i}.mlp.shared_experts.gate_weight",
        ("model.layers.{i}.mlp.shared_expert_gate.weight",),
        "replicated",
        (("value", "hidden"),),
        "mixture",
    ),
    *experts("mlp.experts.{e}"),
)

FAMILY = decoder_family(
    "qwen3_5_moe_text",
    qk_norm=True,
    # No layer is dense, and config.json says no width of one.
    defaults=DEFAULTS | {"num_key_value_heads": 2, "intermediate_size": 512},
    refused=("attention_bias",),
    attention=ATTENTION,
    delta_net=True,
    untrained=("mtp.",),
    mixture=Mixture(
        experts=("num_experts", "num_local_experts"),
        expert_ffn="moe_intermediate_size",
        shared_ffn="shared_expert_intermediate_size",
    ),
    mixture_rules=MIXTURE_RULES,
)
# The released files.
RELEASED = released(
    FAMILY,
    "qwen3_5_moe",
    replace(TOWER, transformers_class="qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeVisionModel"),
    stacks_experts=True,
)
