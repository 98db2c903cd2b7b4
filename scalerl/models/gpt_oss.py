"""The family of gpt-oss: attention sinks, sliding windows in every second layer, biases everywhere, stacked experts.

A sink is a learned logit of a head that takes its share of the softmax and has no value (arXiv 2309.17453, 3.2).
"""

from __future__ import annotations

from scalerl.models.mixture import Mixture
from scalerl.models.rules import decoder_family, router
from scalerl.models.table import Kind, ParamPattern

_HF = "model.layers.{i}.mlp"


def _of_experts(name: str, hf: tuple[str, ...], kind: Kind, dims: tuple[str, ...]) -> ParamPattern:
    """The rule of a tensor of each expert, all of a layer stacked.  hf: the stack, once for each part of these dims."""
    return ParamPattern(
        f"decoder.layers.{{i}}.mlp.experts.local_experts.{{e}}.{name}",
        tuple(f"{_HF}.experts.{stack}" for stack in hf),
        kind,
        (dims,) * len(hf),
        "mixture",
        stacked=True,
    )


ROUTER_BIAS = ParamPattern(
    "decoder.layers.{i}.mlp.router.bias", (f"{_HF}.router.bias",), "replicated", (("experts",),), "mixture"
)

FAMILY = decoder_family(
    "gpt_oss",
    qkv_bias=True,
    sliding_layers=True,
    facts={"attention_sinks": True, "linear_bias": True},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
        "attention_bias": True,
    },
    mixture=Mixture(
        experts=("num_local_experts", "num_experts"),
        expert_ffn="intermediate_size",
        # transformers has these numbers in its code.
        refused=(("attention_bias", True), ("swiglu_limit", 7.0), ("hidden_act_alpha", 1.702)),
    ),
    mixture_rules=(
        router("mlp.router"),
        ROUTER_BIAS,
        _of_experts("linear_fc1.weight", ("gate_up_proj", "gate_up_proj"), "gate_up", ("expert_ffn", "hidden")),
        _of_experts("linear_fc1.bias", ("gate_up_proj_bias", "gate_up_proj_bias"), "gate_up", ("expert_ffn",)),
        _of_experts("linear_fc2.weight", ("down_proj",), "row", ("hidden", "expert_ffn")),
        _of_experts("linear_fc2.bias", ("down_proj_bias",), "replicated", ("hidden",)),
    ),
)
