"""The family of MiniMax-M2: a sigmoid router with a bias, queries and keys normed over all heads, half a head turns."""

from __future__ import annotations

from dataclasses import replace

from scalerl.models.deepseek_v3 import ROUTER_BIAS
from scalerl.models.mixture import Mixture
from scalerl.models.rules import decoder_family, experts, router

FAMILY = decoder_family(
    "minimax_m2",
    facts={"joint_qk_norm": True},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5e6,
        "partial_rotary_factor": 1.0,
        "rotary_dim": None,
        "eos_token_id": 200020,
    },
    # SGLang reads lm_head.weight from the files, whatever tie_word_embeddings says.
    refused=("tie_word_embeddings",),
    mixture=Mixture(
        experts=("num_local_experts",),
        expert_ffn="intermediate_size",
        score="sigmoid",
        bias=True,
        # transformers has these in its code.
        refused=(
            ("scoring_func", "sigmoid"),
            ("use_routing_bias", True),
            ("use_qk_norm", True),
            ("qk_norm_type", "per_layer"),
            ("shared_intermediate_size", 0),
        ),
    ),
    mixture_rules=(
        router("block_sparse_moe.gate"),
        replace(ROUTER_BIAS, hf=("model.layers.{i}.block_sparse_moe.e_score_correction_bias",)),
        # As of Mixtral.
        *experts("block_sparse_moe.experts.{e}", parts=("w1", "w3", "w2")),
    ),
)
