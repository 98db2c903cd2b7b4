"""The family of Qwen3-Next: Qwen3.5's mixture, whose files have the delta nets' projections head by head already."""

from __future__ import annotations

from dataclasses import replace

from scalerl.models.mixture import Mixture
from scalerl.models.qwen3_5 import DEFAULTS, DELTA_NET, GATED_ATTENTION, IN_PROJ
from scalerl.models.qwen3_5_moe import MIXTURE_RULES
from scalerl.models.qwen3_moe import is_mixture
from scalerl.models.rules import decoder_family

_IN_PROJ = replace(
    IN_PROJ,
    hf=tuple(f"model.layers.{{i}}.linear_attn.in_proj_{part}.weight" for part in ("qkvz", "ba")),
    dims=(("delta_qkvz", "hidden"), ("delta_ba", "hidden")),
    sections=(("delta_qkvz",), ("delta_ba",)),
)

FAMILY = decoder_family(
    "qwen3_next",
    qk_norm=True,
    defaults=DEFAULTS
    | {"num_key_value_heads": 2, "intermediate_size": 5632, "norm_topk_prob": True, "decoder_sparse_step": 1},
    refused=("attention_bias",),
    attention=(_IN_PROJ, *DELTA_NET, *GATED_ATTENTION),
    delta_net=True,
    untrained=("mtp.",),
    mixture=Mixture(
        experts=("num_experts", "num_local_experts"),
        expert_ffn="moe_intermediate_size",
        shared_ffn="shared_expert_intermediate_size",
        layers=is_mixture,
        normalize="norm_topk_prob",
    ),
    mixture_rules=MIXTURE_RULES,
)
