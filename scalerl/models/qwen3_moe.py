"""The family of Qwen3-MoE: Qwen3 with experts in place of the MLP, in all or every decoder_sparse_step-th layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scalerl.models.mixture import Mixture
from scalerl.models.rules import decoder_family, experts, router


def is_mixture(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has experts, by mlp_only_layers and decoder_sparse_step."""
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % config["decoder_sparse_step"] == 0


FAMILY = decoder_family(
    "qwen3_moe",
    qk_norm=True,
    defaults={"num_key_value_heads": 4, "norm_topk_prob": False, "decoder_sparse_step": 1},
    refused=("attention_bias", "use_sliding_window"),
    mixture=Mixture(
        experts=("num_experts", "num_local_experts"),
        expert_ffn="moe_intermediate_size",
        layers=is_mixture,
        normalize="norm_topk_prob",
    ),
    mixture_rules=(router("mlp.gate"), *experts("mlp.experts.{e}")),
)
