"""The sizes and options that define a model's architecture, read from a Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scalerl.models.block_scales import weight_block
from scalerl.models.mxfp4 import is_mxfp4
from scalerl.models.registry import family_named, family_of
from scalerl.models.table import HF_MODEL, Family
from scalerl.models.vision import VisionModel, vision_config

if TYPE_CHECKING:
    from scalerl.models.adapters import Adapter

# Key of config.json for each field that has no default.
REQUIRED_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
LLAMA3_ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
YARN_ROPE_KEYS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
# Keys of a dense family's yarn; further ones scale attention, which transformers and SGLang read differently.
DENSE_YARN_KEYS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate")
DENSE_YARN_REFUSED = ("attention_factor", "attn_factor", "mscale", "mscale_all_dim", "extrapolation_factor")
# Supported rope types, with the keys that each must have.
ROPE_TYPES = {"default": (), "llama3": LLAMA3_ROPE_KEYS, "yarn": DENSE_YARN_KEYS}
LATENT_ROPE_TYPES = {"default": (), "yarn": YARN_ROPE_KEYS}
YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
DENSE_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
DELTA_NET_KEYS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
LATENT_KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_ORIGINAL = "original_max_position_embeddings"
_PARTIAL = "partial_rotary_factor"
_ROTARY_DIM = "rotary_dim"
_TIED = "tie_word_embeddings"
_ROPE_NUMBERS = {"rope_theta", _PARTIAL, *LLAMA3_ROPE_KEYS, *YARN_ROPE_KEYS}
# Integers that a model may have as 0, and as null: none.
_MAY_BE_ZERO = ("first_k_dense_replace", "n_shared_experts")
_MAY_BE_NULL = ("q_lora_rank", "sliding_window")
# Keys of config.json that are of the whole model where the language model's are in a key.
_OF_THE_WHOLE = ("model_type", "architectures", "dtype", "torch_dtype", "quantization_config", "transformers_weights")
_OF_THE_WHOLE += ("id2label", "num_labels")
_KINDS = {bool: "true or false", float: "a floating-point number", str: "a text", dict: "an object"}
DTYPES = ("float32", "bfloat16", "float16")
Head = Literal["lm", "value"]
LM_ARCHITECTURE = "ForCausalLM"
# Of a model with a vision tower.
VISION_ARCHITECTURE = "ForConditionalGeneration"
VALUE_ARCHITECTURES = ("ForSequenceClassification", "ForTokenClassification")


@dataclass(frozen=True)
class ModelShape:
    """The architecture of a decoder, dense or with a mixture of experts in some or all layers.

    rope_scaling: None, or {"rope_type": "llama3", factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings}, or {"rope_type": "yarn", factor, original_max_position_embeddings, beta_fast,
    beta_slow, truncate}, with latent attention mscale and mscale_all_dim in the place of truncate.
    max_position_embeddings: with yarn those that it extends the model to.
    dtype: data type of the stored weights, or that they had before quantization: float32, bfloat16 or float16.
    eos_token_ids: from config.json and generation_config.json, ascending.
    num_experts, num_experts_per_token, moe_ffn_hidden_size: routed experts of a mixture layer (0: dense model).
    shared_expert_ffn_hidden_size: width of all shared experts together (0: none). shared_expert_gate: their output is
    multiplied with the sigmoid of a linear layer of the token.
    moe_layers: True for each layer that is a mixture (empty: none is).
    router_score: function of the router's logits, softmax or sigmoid. router_normalizes: the weights of the chosen
    experts sum to 1, before router_scale. router_has_bias: the router has a bias that affects the choice only.
    router_groups, router_top_groups: experts are chosen from the best router_top_groups of router_groups groups.
    partial_rotary_factor: the part of each head, from its first number on, that the rotary embedding turns.
    rotary_interleaved: neighbours are the pairs that it turns, not the numbers of two halves.
    nope_layers: True for each layer without rotary embedding (empty: none).
    joint_qk_norm: queries are normed, and keys, over all heads together.
    post_norms: the outputs of attention and MLP are normed before they are added to the residual.
    linear_layers: True for each layer with a gated delta net in the place of attention (empty: none).
    linear_num_key_heads .. linear_conv_kernel_dim: its sizes (0: none); linear_conv_kernel_dim tokens are seen by its
    convolution. attention_gate: attention's output is multiplied with the sigmoid of a gate. zero_centred_norms: norms
    multiply with 1 + weight, a delta net's output norm excepted.
    sliding_layers: True for each layer whose tokens see only the last sliding_window tokens, themselves among them
    (empty: no layer). attention_sinks: each head has a learned logit that takes a share of its softmax.
    linear_bias: attention's output projections, routers and experts have biases, and experts gpt-oss's activation.
    num_prediction_layers: extra layers that predict further tokens; they are stored with the model and not used.
    q_lora_rank .. v_head_dim: latent attention (None: grouped-query attention; q_lora_rank None: queries uncompressed).
    head: lm (next-token logits), or value (one number per token: critics and reward models; never tied).
    adapter: the low-rank adapter that is trained in the place of the weights (None: they are trained); not of
    config.json.
    vision: the vision tower (None: none, or one that is left out). frozen_tower: it is not trained; not of
    config.json.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None = field(hash=False)
    norm_eps: float
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    shared_expert_ffn_hidden_size: int = 0
    shared_expert_gate: bool = False
    moe_layers: tuple[bool, ...] = ()
    router_score: str = "softmax"
    router_normalizes: bool = True
    router_has_bias: bool = False
    router_groups: int = 1
    router_top_groups: int = 1
    router_scale: float = 1.0
    num_prediction_layers: int = 0
    partial_rotary_factor: float = 1.0
    rotary_interleaved: bool = False
    nope_layers: tuple[bool, ...] = ()
    joint_qk_norm: bool = False
    post_norms: bool = False
    linear_layers: tuple[bool, ...] = ()
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    attention_gate: bool = False
    zero_centred_norms: bool = False
    sliding_layers: tuple[bool, ...] = ()
    sliding_window: int = 0
    attention_sinks: bool = False
    linear_bias: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    head: Head = "lm"
    adapter: Adapter | None = None
    vision: VisionModel | None = None
    frozen_tower: bool = False

    @classmethod
    def from_hf(cls, model_dir: str | Path) -> ModelShape:
        """Reads config.json (transformers 4 and 5 spelling) and generation_config.json of a model directory.

        Raises ValueError: no config.json, unsupported model_type, or every unsupported feature at once.
        """
        config = read_config(model_dir)
        generation = _read_json(Path(model_dir) / "generation_config.json", required=False)
        try:
            return cls.from_config(config, generation)
        except ValueError as error:
            raise ValueError(f"{Path(model_dir) / 'config.json'}: {error}") from None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelShape:
        """Reads the shape from parsed config.json and generation_config.json.  Raises ValueError as `from_hf`."""
        family = family_of(config)
        problems = _two_values(config, family)
        vision, vision_problems = _vision(config)
        problems += vision_problems
        config = with_defaults(config)
        problems += _missing_or_bad(config, family)
        if problems:
            raise ValueError("; ".join(problems))
        rope_theta, rope_scaling, problems = _rope(config, family)
        problems += _unsupported(config, family)
        mixture, mixture_problems = family.mixture.fields(config) if family.mixture else ({}, [])
        latent, latent_problems = _latent(config) if family.latent else ({}, [])
        delta_net, delta_net_problems = _delta_net(config) if family.delta_net else ({}, [])
        sliding, sliding_problems = _sliding(config) if family.sliding_layers else ({}, [])
        nope, nope_problems = _nope(config) if family.nope_layers else ({}, [])
        problems += mixture_problems + latent_problems + delta_net_problems + sliding_problems + nope_problems
        heads = config["num_attention_heads"]
        kv_heads = (None if family.latent else config["num_key_value_heads"]) or heads
        if heads % kv_heads:
            problems.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        # gpt-oss's published config.json names none.
        default = "bfloat16" if is_mxfp4(config) else "float32"
        dtype = str(config.get("dtype") or config.get("torch_dtype") or default).removeprefix("torch.")
        if dtype not in DTYPES:
            problems.append(f"dtype {dtype!r} is not supported (one of {', '.join(DTYPES)})")
        if problems:
            raise ValueError("; ".join(problems))
        return cls(
            model_type=family.model_type,
            **{field: config[key] for field, key in REQUIRED_KEYS.items()},
            num_kv_heads=kv_heads,
            head_dim=latent.pop("head_dim", None) or config["head_dim"] or config["hidden_size"] // heads,
            max_position_embeddings=max_positions(config),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            norm_eps=config["rms_norm_eps"],
            tie_word_embeddings=config["tie_word_embeddings"] and not _is_value_model(config),
            head="value" if _is_value_model(config) else "lm",
            partial_rotary_factor=1.0 if family.latent else _partial_rotary_factor(config),
            qk_norm=config[family.qk_norm] if isinstance(family.qk_norm, str) else family.qk_norm,
            qkv_bias=config[family.qkv_bias] if isinstance(family.qkv_bias, str) else family.qkv_bias,
            dtype=dtype,
            eos_token_ids=_eos_token_ids(config, generation or {}),
            num_prediction_layers=config.get("num_nextn_predict_layers") or 0,
            vision=vision,
            **mixture,
            **latent,
            **delta_net,
            **sliding,
            **nope,
            **family.facts,
        )

    @property
    def rotary_dim(self) -> int:
        """Numbers of a query or key head that the rotary embedding turns, without latent attention."""
        return int(self.head_dim * self.partial_rotary_factor)

    def with_head(self, head: Head) -> ModelShape:
        """The same model with another head.  Raises ValueError for the lm head of a value model, which has none."""
        if head == self.head:
            return self
        if head == "lm":
            raise ValueError(
                "config.json's architectures name a value model (one number for every token), which predicts no words; "
                "give a causal language model"
            )
        return replace(self, head="value", tie_word_embeddings=False)

    def without_tower(self) -> ModelShape:
        """The language model alone, of a model whose vision tower is left as it is in the files."""
        return replace(self, vision=None)


def read_config(model_dir: str | Path) -> dict[str, Any]:
    """Parses a model directory's config.json.  Raises ValueError if either is missing or the file is no JSON object."""
    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        raise ValueError(f"{model_dir} is not a directory; give a local Hugging Face model directory")
    return _read_json(model_dir / "config.json", required=True)


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the keys that it leaves out, as transformers fills them in; of an unknown family as it is."""
    family = family_named(config.get("model_type"))
    return {**family.defaults, **_of_text(config)} if family else dict(config)


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the language model: where they are in a key of config.json, these, and what is of the whole model."""
    family = family_named(config.get("model_type"))
    text = config.get(family.text_config) if family and family.text_config else None
    if not isinstance(text, Mapping):
        return config
    return {**text, **{key: config[key] for key in _OF_THE_WHOLE if key in config}}


def eos_token_ids(model_dir: str | Path) -> tuple[int, ...]:
    """The tokens, ascending, that end a response by config.json and generation_config.json, of any family.

    Raises ValueError as `read_config`.
    """
    generation = _read_json(Path(model_dir) / "generation_config.json", required=False)
    return _eos_token_ids(with_defaults(read_config(model_dir)), generation)


def attention_interval(attends: Sequence[bool]) -> int | None:
    """The n of layers of which every n-th attends, and no other; None: there is none.  attends: of each layer."""
    every = attends.index(True) + 1 if True in attends else len(attends) + 1
    return every if list(attends) == [(layer + 1) % every == 0 for layer in range(len(attends))] else None


def max_positions(config: Mapping[str, Any]) -> int:
    """Tokens that a model of this config.json can attend to: yarn extends its original positions by its factor."""
    positions = with_defaults(config).get("max_position_embeddings") or 32768
    rope = rope_entries(config)
    original, factor = rope.get("original_max_position_embeddings") or positions, rope.get("factor")
    if (rope.get("rope_type") or rope.get("type")) == "yarn" and factor:
        return max(positions, int(original * factor))
    return positions


def value_model_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json, as transformers reads it, of a value model that starts from a language model's."""
    if _is_value_model(config):
        return dict(config)
    names = config.get("architectures") or []
    without_head = [name.removesuffix(LM_ARCHITECTURE).removesuffix(VISION_ARCHITECTURE) for name in names]
    text = config.get("text_config")
    return (
        dict(config)
        | ({"text_config": {**text, _TIED: False}} if isinstance(text, Mapping) else {})
        | {
            "architectures": [name + VALUE_ARCHITECTURES[0] for name in without_head],
            # transformers stores num_labels=1 as these two.
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            # A value model has no output embedding that could be tied.
            "tie_word_embeddings": False,
        }
    )


def _is_value_model(config: Mapping[str, Any]) -> bool:
    return any(str(name).endswith(VALUE_ARCHITECTURES) for name in config.get("architectures") or ())


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise ValueError(f"{path.parent} has no {path.name}; give a Hugging Face model directory")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content


def rope_entries(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary embedding's entries of config.json: rope_scaling counts before rope_parameters, as in transformers."""
    config = _of_text(config)
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _two_values(config: Mapping[str, Any], family: Family) -> list[str]:
    """One sentence where the whole model and its language model disagree; config.json as it is."""
    if not family.text_config:
        return []
    if not isinstance(text := config.get(family.text_config), Mapping):
        if family.tower and family.prefix == HF_MODEL and text is None:
            # As Qwen2.5-VL is published: the language model's keys are beside the vision tower's.
            return []
        return [f"{family.text_config} is {text!r}, not an object with the language model's keys"]
    tied, of_text = config.get(_TIED, False), text.get(_TIED, False)
    if tied == of_text:
        return []
    return [f"{_TIED} is {tied!r}, and {of_text!r} in {family.text_config}: engines differ; set both to one value"]


def _vision(config: Mapping[str, Any]) -> tuple[VisionModel | None, list[str]]:
    """The vision tower, and what is wrong with it; config.json as it is."""
    try:
        return vision_config(config), []
    except ValueError as error:
        return None, [str(error)]


def _missing_or_bad(config: Mapping[str, Any], family: Family) -> list[str]:
    problems = []
    for key in REQUIRED_KEYS.values():
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(f"{key} is missing" if value is None else f"{key} is {value!r}, not a positive integer")
    problems += [problem for key in family.defaults if (problem := _bad_type(key, config[key], family))]
    return problems + _bad_rope(config)


def _bad_type(key: str, value: Any, family: Family) -> str | None:
    """What is wrong with the type of an optional value of config.json, which transformers refuses too."""
    default = family.defaults[key]
    if value is None and (default is None or key in _MAY_BE_NULL):
        return None
    if key == "eos_token_id":
        ids = value if isinstance(value, list) else [value]
        fits, kind = all(type(token) is int for token in ids), "a token id, nor a list of them"
    elif isinstance(default, int | None) and not isinstance(default, bool):
        fits = type(value) is int and value >= (0 if key in _MAY_BE_ZERO else 1)
        kind = "a positive integer"
    else:
        fits = type(value) is type(default) or (key == "rope_theta" and type(value) is int)
        kind = _KINDS[type(default)]
    return None if fits else f"{key} is {value!r}, not {kind}"


def _bad_rope(config: Mapping[str, Any]) -> list[str]:
    """What is wrong with the types of the rotary embedding's entries, one sentence per problem."""
    problems = []
    for section in ("rope_scaling", "rope_parameters"):
        entries = config.get(section) or {}
        if not isinstance(entries, dict):
            problems.append(f"{section} is {entries!r}, not an object")
            continue
        for key, value in entries.items():
            if key in _ROPE_NUMBERS and value is not None and type(value) not in (int, float):
                problems.append(f"{section}.{key} is {value!r}, not a number")
            elif key in ("rope_type", "type") and not isinstance(value, str | None):
                problems.append(f"{section}.{key} is {value!r}, not a text")
    return problems


def _partial_rotary_factor(config: Mapping[str, Any]) -> float:
    return rope_entries(config).get(_PARTIAL) or config.get(_PARTIAL) or 1.0


def _rope(config: Mapping[str, Any], family: Family) -> tuple[float, dict[str, Any] | None, list[str]]:
    # transformers 5: rope_parameters {rope_theta, rope_type}; 4: rope_theta beside rope_scaling {rope_type or type}.
    rope = dict(rope_entries(config))
    theta = float(rope.pop("rope_theta", None) or config["rope_theta"])
    rope_type = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    if family.tower and rope_type == "mrope":
        # An older name of the default with a picture's positions.
        rope_type = "default"
    supported = LATENT_ROPE_TYPES if family.latent else ROPE_TYPES
    if rope_type not in supported:
        return theta, None, [f"rope type {rope_type!r} is not supported (one of {', '.join(supported)})"]
    partial = _partial_rotary_factor(config)
    is_refused = partial != 1.0 and _PARTIAL not in family.defaults
    problems = [f"{_PARTIAL} {partial} is not supported (only 1.0)"] if is_refused else []
    if _ROTARY_DIM in family.defaults:
        problems += _rotary_dim_problems(config[_ROTARY_DIM], config["head_dim"], partial)
    if isinstance(outside := config.get(_ORIGINAL), int) and outside != rope.get(_ORIGINAL, outside):
        problems.append(f"{_ORIGINAL} is {outside} beside the rope's {rope[_ORIGINAL]}: engines differ; leave one out")
    if rope_type == "default":
        return theta, None, problems
    if rope_type == "yarn":
        rope = {key: value for key, value in rope.items() if value is not None}
        refused = [] if family.latent else [key for key in DENSE_YARN_REFUSED if key in rope]
        problems += [f"rope type yarn with {key} {rope[key]!r} is not supported: leave it out" for key in refused]
        rope = (YARN_DEFAULTS if family.latent else DENSE_YARN_DEFAULTS) | rope
    problems += [f"rope type {rope_type} needs {key}" for key in supported[rope_type] if rope.get(key) is None]
    return theta, {"rope_type": rope_type} | {key: rope.get(key) for key in supported[rope_type]}, problems


def _rotary_dim_problems(turned: int | None, head_dim: int, partial: float) -> list[str]:
    """One sentence where the two keys for the part of each head that turns disagree.  turned: rotary_dim."""
    wanted = int(head_dim * partial)
    if (turned or head_dim) == wanted:
        return []
    return [
        f"{_ROTARY_DIM} is {turned!r}, which SGLang reads, and {_PARTIAL} is {partial} of head_dim {head_dim}, which "
        f"transformers reads; set {_PARTIAL} to {(turned or head_dim) / head_dim}, or {_ROTARY_DIM} to {wanted}"
    ]


def _latent(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The sizes of latent attention, and one sentence per problem.  head_dim: that of queries and keys."""
    sizes: dict[str, Any] = {key: config.get(key) for key in LATENT_KEYS}
    bad = [key for key, size in sizes.items() if not isinstance(size, int) or size < 1]
    if bad:
        return {}, [f"{key} is {sizes[key]!r}, not a positive integer" for key in bad]
    rope, other = sizes["qk_rope_head_dim"], config.get("head_dim")
    if other not in (None, rope):
        # transformers takes it for the rotary embedding, not for the projections.
        return {}, [f"head_dim {other} is not supported with qk_rope_head_dim {rope}: leave head_dim out"]
    head_dim = sizes["qk_nope_head_dim"] + rope
    return sizes | {"q_lora_rank": config.get("q_lora_rank"), "head_dim": head_dim}, []


def _delta_net(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of a family with gated delta nets, and one sentence per problem.  config: with the defaults."""
    num_layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    problems = []
    if kinds is None:
        every = config["full_attention_interval"]
        kinds = ["full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(num_layers)]
    elif not isinstance(kinds, list) or len(kinds) != num_layers:
        problems.append(f"layer_types {kinds!r} is not a list with a kind for each of {num_layers} layers")
    sizes = {key: config[key] for key in DELTA_NET_KEYS}
    if sizes["linear_num_value_heads"] % sizes["linear_num_key_heads"]:
        problems.append(
            f"linear_num_value_heads {sizes['linear_num_value_heads']} is not a multiple of linear_num_key_heads "
            f"{sizes['linear_num_key_heads']}"
        )
    layers = tuple(kind == "linear_attention" for kind in kinds)
    return sizes | {"linear_layers": layers, "attention_gate": True, "zero_centred_norms": True}, problems


def _sliding(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Which layers have a sliding window, and one sentence per problem.  config: with the family's defaults."""
    num_layers, kinds, window = config["num_hidden_layers"], config.get("layer_types"), config["sliding_window"]
    if kinds is None:
        # What transformers takes.
        kinds = [("sliding_attention", "full_attention")[layer % 2] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        return {}, [f"layer_types {kinds!r} is not a list of {num_layers} texts, one for each layer"]
    layers = tuple(kind == "sliding_attention" for kind in kinds)
    if any(layers) and not window:
        return {}, [f"sliding_window is {window!r}, and layer_types names sliding_attention: give the window"]
    return {"sliding_layers": layers, "sliding_window": window or 0}, []


def _nope(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Which layers have no rotary embedding, and one sentence per problem.  config: with the family's defaults."""
    num_layers, turns = config["num_hidden_layers"], config.get("no_rope_layers")
    if turns is None:
        every = config["no_rope_layer_interval"]
        turns = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if not isinstance(turns, list) or len(turns) != num_layers or any(turn not in (0, 1) for turn in turns):
        return {}, [f"no_rope_layers {turns!r} is not a list of {num_layers} numbers 0 (no rotary embedding) or 1"]
    return {"nope_layers": tuple(not turn for turn in turns)}, []


def _unsupported(config: Mapping[str, Any], family: Family) -> list[str]:
    problems = [f"{key} {config[key]!r} is not supported" for key in family.refused if config.get(key)]
    window, positions = config.get(family.window), config["max_position_embeddings"]
    if window and window < positions:
        problems.append(
            f"{family.window} {window} is not supported with max_position_embeddings {positions}: set it to null, or "
            f"max_position_embeddings to {window} at most"
        )
    known = ["full_attention"]
    known += ["linear_attention"] if family.delta_net else []
    known += ["sliding_attention"] if family.sliding_layers else []
    layer_types = {str(t) for t in config.get("layer_types") or () if t not in known}
    if layer_types:
        problems.append(f"layer_types {', '.join(sorted(layer_types))} is not supported (only {', '.join(known)})")
    # transformers leaves out id2label if there are two labels.
    labels = config.get("num_labels") or len(config.get("id2label") or ("LABEL_0", "LABEL_1"))
    if _is_value_model(config) and labels != 1:
        problems.append(f"a value model with {labels} labels is not supported (id2label must name one)")
    try:
        weight_block(config)
    except ValueError as error:
        problems.append(str(error))
    if config.get("transformers_weights"):
        problems.append(f"transformers_weights {config['transformers_weights']!r} is not supported: leave it out")
    if config["hidden_act"] != "silu":
        problems.append(f"hidden_act {config['hidden_act']!r} is not supported (only silu)")
    return problems


def _eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    ids: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))
