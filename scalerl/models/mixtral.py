"""The family of Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from scalerl.models.mixture import Mixture
from scalerl.models.rules import decoder_family, experts, router

FAMILY = decoder_family(
    "mixtral",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "eos_token_id": 2,
    },
    window="sliding_window",
    mixture=Mixture(experts=("num_local_experts",), expert_ffn="intermediate_size"),
    mixture_rules=(
        router("block_sparse_moe.gate"),
        # w1 is the gate projection, w3 up, w2 down.
        *experts("block_sparse_moe.experts.{e}", parts=("w1", "w3", "w2")),
    ),
)
