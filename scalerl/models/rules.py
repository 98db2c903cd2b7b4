"""The rules of tensors that families choose from, and `decoder_family`, which puts a family together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from scalerl.models.mixture import Mixture
from scalerl.models.table import HF_MODEL, Family, ParamPattern, Tower, TowerTensor, Where

# Beginning of the names of layer i's tensors in Hugging Face files.
_HF_LAYER = f"{HF_MODEL}layers.{{i}}."

EMBEDDING = ParamPattern(
    "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab", (("vocab", "hidden"),)
)
FINAL_NORM = ParamPattern("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated", (("hidden",),))
HEAD = ParamPattern("output_layer.weight", ("lm_head.weight",), "vocab", (("vocab", "hidden"),))


def _qkv(suffix: str, tail: tuple[str, ...], given: str = "") -> ParamPattern:
    return ParamPattern(
        f"decoder.layers.{{i}}.self_attention.linear_qkv.{suffix}",
        tuple(f"model.layers.{{i}}.self_attn.{p}_proj.{suffix}" for p in "qkv"),
        "qkv",
        tuple((rows, *tail) for rows in ("q", "kv", "kv")),
        given=given,
    )


def _norm(name: str, hf: str, dim: str, given: str = "") -> ParamPattern:
    return ParamPattern(
        f"decoder.layers.{{i}}.{name}.weight",
        (f"model.layers.{{i}}.{hf}.weight",),
        "replicated",
        ((dim,),),
        given=given,
    )


INPUT_NORM = _norm("input_layernorm", "input_layernorm", "hidden")
QKV_WEIGHT = _qkv("weight", ("hidden",))
QKV_BIAS = _qkv("bias", (), given="qkv_bias")
Q_NORM = _norm("self_attention.q_layernorm", "self_attn.q_norm", "head_dim", given="qk_norm")
K_NORM = _norm("self_attention.k_layernorm", "self_attn.k_norm", "head_dim", given="qk_norm")
# Of all heads together.
JOINT_Q_NORM, JOINT_K_NORM = (
    ParamPattern(
        f"decoder.layers.{{i}}.self_attention.{name}.weight",
        (f"{_HF_LAYER}self_attn.{name}.weight",),
        "column",
        ((rows,),),
        given="joint_qk_norm",
    )
    for name, rows in (("q_norm", "q"), ("k_norm", "kv"))
)
PROJ = ParamPattern(
    "decoder.layers.{i}.self_attention.linear_proj.weight",
    (f"{_HF_LAYER}self_attn.o_proj.weight",),
    "row",
    (("hidden", "q"),),
)
PROJ_BIAS = ParamPattern(
    "decoder.layers.{i}.self_attention.linear_proj.bias",
    (f"{_HF_LAYER}self_attn.o_proj.bias",),
    "replicated",
    (("hidden",),),
    given="linear_bias",
)
SINKS = ParamPattern(
    "decoder.layers.{i}.self_attention.core_attention.sinks",
    (f"{_HF_LAYER}self_attn.sinks",),
    "column",
    (("heads",),),
    given="attention_sinks",
)
MLP_NORM = _norm("pre_mlp_layernorm", "post_attention_layernorm", "hidden")
# Of what is added to the residual.
POST_ATTENTION_NORM = _norm("self_attn_bda", "post_self_attn_layernorm", "hidden", given="post_norms")
POST_MLP_NORM = _norm("mlp_bda", "post_mlp_layernorm", "hidden", given="post_norms")


def mlp(
    name: str,
    hf: str,
    width: str,
    *,
    where: Where,
    parts: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    given: str = "",
) -> tuple[ParamPattern, ParamPattern]:
    """Rules of a SwiGLU MLP: gate and up in one matrix, then down.

    name, hf: paths inside the layer.  parts: Hugging Face names of gate, up and down.
    """
    gate, up, down = (f"{_HF_LAYER}{hf}.{part}.weight" for part in parts)
    path = f"decoder.layers.{{i}}.{name}"
    return (
        ParamPattern(f"{path}.linear_fc1.weight", (gate, up), "gate_up", ((width, "hidden"),) * 2, where, given),
        ParamPattern(f"{path}.linear_fc2.weight", (down,), "row", (("hidden", width),), where, given),
    )


DENSE_MLP = mlp("mlp", "mlp", "ffn", where="dense")
# The files have gate and up in one tensor.
GATE_UP_MLP = (
    replace(
        DENSE_MLP[0],
        hf=(f"{_HF_LAYER}mlp.gate_up_proj.weight",),
        dims=(("gate_up_ffn", "hidden"),),
        sections=(("ffn", "ffn"),),
    ),
    DENSE_MLP[1],
)


def router(hf: str) -> ParamPattern:
    """The rule of a router.  hf: its path inside the layer."""
    return ParamPattern(
        "decoder.layers.{i}.mlp.router.weight",
        (f"{_HF_LAYER}{hf}.weight",),
        "replicated",
        (("experts", "hidden"),),
        "mixture",
    )


def experts(hf: str, parts: Sequence[str] = ("gate_proj", "up_proj", "down_proj")) -> tuple[ParamPattern, ParamPattern]:
    """The rules of an expert.  hf: its path inside the layer, with `{e}`."""
    return mlp("mlp.experts.local_experts.{e}", hf, "expert_ffn", where="mixture", parts=parts)


def linear(name: str, rows: str, columns: str) -> tuple[TowerTensor, TowerTensor]:
    """Weight and bias of a linear layer of a vision tower."""
    return (f"{name}.weight", (rows, columns)), (f"{name}.bias", (rows,))


def released(text: Family, model_type: str, tower: Tower, *, stacks_experts: bool = False) -> Family:
    """The family of files of a model with a vision tower, whose language model is of the family `text`."""
    prefix = "model.language_model."

    def named(rules: Iterable[ParamPattern]) -> tuple[ParamPattern, ...]:
        return tuple(
            replace(rule, hf=tuple(prefix + name.removeprefix(HF_MODEL) for name in rule.hf)) for rule in rules
        )

    return replace(
        text,
        model_type=model_type,
        first=named(text.first),
        layer=named(text.layer),
        last=named(text.last),
        prefix=prefix,
        text_config="text_config",
        stacks_experts=stacks_experts,
        tower=tower,
    )


# What transformers takes for keys that most families' config.json may leave out. num_key_value_heads None: as many as
# heads of queries; head_dim None: hidden_size / num_attention_heads.
_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}


def decoder_family(
    model_type: str,
    *,
    qk_norm: bool | str = False,
    qkv_bias: bool | str = False,
    defaults: Mapping[str, Any] | None = None,
    refused: Sequence[str] = (),
    window: str = "",
    mixture: Mixture | None = None,
    mixture_rules: Iterable[ParamPattern] = (),
    attention: Iterable[ParamPattern] | None = None,
    dense_mlp: Iterable[ParamPattern] = DENSE_MLP,
    delta_net: bool = False,
    untrained: Sequence[str] = (),
    sliding_layers: bool = False,
    nope_layers: bool = False,
    facts: Mapping[str, Any] | None = None,
) -> Family:
    """A family of pre-norm decoders with SwiGLU and RMSNorm.

    defaults: where they are others than `_DEFAULTS`, or of further keys.
    attention: rules in place of those of grouped-query attention: of latent attention, or (delta_net) of gated delta
    nets and the attention between them.
    """
    latent = attention is not None and not delta_net
    flags = [flag for flag in (qk_norm, qkv_bias) if isinstance(flag, str)]
    if attention is None:
        attention = (QKV_WEIGHT, QKV_BIAS, Q_NORM, K_NORM, JOINT_Q_NORM, JOINT_K_NORM, PROJ, PROJ_BIAS, SINKS)
    return Family(
        model_type=model_type,
        first=(EMBEDDING,),
        layer=(INPUT_NORM, *attention, POST_ATTENTION_NORM, MLP_NORM, *dense_mlp, *mixture_rules, POST_MLP_NORM),
        last=(FINAL_NORM,),
        head=HEAD,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        defaults={**_DEFAULTS, **dict.fromkeys((*refused, *flags), False), **(defaults or {})},
        refused=tuple(refused),
        window=window,
        mixture=mixture,
        latent=latent,
        delta_net=delta_net,
        untrained=tuple(untrained),
        sliding_layers=sliding_layers,
        nope_layers=nope_layers,
        facts=facts or {},
    )
