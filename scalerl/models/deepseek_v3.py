"""The family of DeepSeek-V3 and R1: latent attention, shared experts, a sigmoid router with a bias, expert groups.

The rotary part of queries and keys is stored interleaved (x0, y0, x1, y1, ...), which is how megatron's latent
attention reads it, so tensors are loaded unchanged.
"""

from __future__ import annotations

from scalerl.models.mixture import Mixture
from scalerl.models.rules import decoder_family, experts, mlp, router
from scalerl.models.table import ParamPattern

_MEGATRON = "decoder.layers.{i}.self_attention"
_HF = "model.layers.{i}.self_attn"

ATTENTION = (
    ParamPattern(
        f"{_MEGATRON}.linear_q_proj.weight",
        (f"{_HF}.q_proj.weight",),
        "column",
        (("q_latent", "hidden"),),
        absent="q_lora_rank",
    ),
    ParamPattern(
        f"{_MEGATRON}.linear_q_down_proj.weight",
        (f"{_HF}.q_a_proj.weight",),
        "replicated",
        (("q_lora", "hidden"),),
        given="q_lora_rank",
    ),
    # SGLang joins it with the one before, and drops either of them that comes in a bucket without the other.
    ParamPattern(
        f"{_MEGATRON}.linear_kv_down_proj.weight",
        (f"{_HF}.kv_a_proj_with_mqa.weight",),
        "replicated",
        (("kv_lora_rope", "hidden"),),
        joins_previous=True,
    ),
    ParamPattern(
        f"{_MEGATRON}.q_layernorm.weight",
        (f"{_HF}.q_a_layernorm.weight",),
        "replicated",
        (("q_lora",),),
        given="q_lora_rank",
    ),
    ParamPattern(
        f"{_MEGATRON}.linear_q_up_proj.weight",
        (f"{_HF}.q_b_proj.weight",),
        "column",
        (("q_latent", "q_lora"),),
        given="q_lora_rank",
    ),
    ParamPattern(f"{_MEGATRON}.kv_layernorm.weight", (f"{_HF}.kv_a_layernorm.weight",), "replicated", (("kv_lora",),)),
    ParamPattern(
        f"{_MEGATRON}.linear_kv_up_proj.weight", (f"{_HF}.kv_b_proj.weight",), "column", (("kv_latent", "kv_lora"),)
    ),
    ParamPattern(f"{_MEGATRON}.linear_proj.weight", (f"{_HF}.o_proj.weight",), "row", (("hidden", "v_latent"),)),
)
ROUTER_BIAS = ParamPattern(
    "decoder.layers.{i}.mlp.router.expert_bias",
    ("model.layers.{i}.mlp.gate.e_score_correction_bias",),
    "replicated",
    (("experts",),),
    "mixture",
    keeps_float32=True,
)

MIXTURE = Mixture(
    experts=("n_routed_experts", "num_local_experts"),
    expert_ffn="moe_intermediate_size",
    layers=lambda config, layer: layer >= config["first_k_dense_replace"],
    shared="n_shared_experts",
    score="sigmoid",
    normalize="norm_topk_prob",
    bias=True,
    groups="n_group",
    top_groups="topk_group",
    scale="routed_scaling_factor",
    refused=(
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
        ("norm_topk_prob", True),
        ("rope_interleave", True),
    ),
)
MIXTURE_RULES = (
    router("mlp.gate"),
    ROUTER_BIAS,
    *mlp(
        "mlp.shared_experts", "mlp.shared_experts", "shared_ffn", where="mixture", given="shared_expert_ffn_hidden_size"
    ),
    *experts("mlp.experts.{e}"),
)

FAMILY = decoder_family(
    "deepseek_v3",
    attention=ATTENTION,
    defaults={
        "max_position_embeddings": 4096,
        "q_lora_rank": 1536,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "eos_token_id": 1,
    },
    refused=("attention_bias",),
    mixture=MIXTURE,
    mixture_rules=MIXTURE_RULES,
)
