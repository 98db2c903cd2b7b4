"""A model directory means what transformers makes of it: odd config.json and odd files, read by both.

What differs is refused, with the key or the tensor; what is read is the same.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from scalerl.models import FAMILIES, HFWeights, ModelShape, family_of
from scalerl.models.shape import REQUIRED_KEYS
from tests.tiny_models import make_tiny_model

# Sizes that fit the defaults of every family, so that each of its keys may be left out.
BASE = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 3e-6,
    "rope_theta": 5e5,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": [7, 9],
    "torch_dtype": "bfloat16",
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 4, "attention_bias": False, "mlp_bias": False},
    "mistral": {"head_dim": 4, "sliding_window": None},
    "qwen2": {"use_sliding_window": False, "sliding_window": 64},
    "qwen3": {"head_dim": 4, "attention_bias": False, "use_sliding_window": False, "sliding_window": 64},
    "qwen3_moe": {
        "head_dim": 4,
        "attention_bias": False,
        "use_sliding_window": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    },
    "mixtral": {"head_dim": 4, "sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "attention_bias": False,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 16,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    # The default of pad_token_id is beyond this vocabulary, as that of smollm3.
    "glm4": {"head_dim": 8, "attention_bias": False, "partial_rotary_factor": 0.25, "pad_token_id": 0},
    "glm4_moe": {
        "head_dim": 8,
        "attention_bias": False,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.25,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 16,
        "n_shared_experts": 2,
        "first_k_dense_replace": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    },
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False}
OF_FAMILY["seed_oss"] = {"head_dim": 4, "attention_bias": False, "attention_out_bias": False, "mlp_bias": False}
OF_FAMILY["smollm3"] = {
    "pad_token_id": 0,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": 64,
    "no_rope_layer_interval": 2,
}
OF_FAMILY["minimax_m2"] = {
    "head_dim": 8,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 1.0,
    "rotary_dim": None,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
OF_FAMILY["gpt_oss"] = {
    "head_dim": 4,
    "attention_bias": True,
    "sliding_window": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": YARN,
}
OF_FAMILY["glm4_moe_lite"] = {
    key: value for key, value in OF_FAMILY["deepseek_v3"].items() if key != "first_k_dense_replace"
} | {"mlp_layer_types": None}
OF_FAMILY["qwen3_5_text"] = {
    "head_dim": 8,
    "attention_bias": False,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "full_attention_interval": 2,
}
OF_FAMILY["qwen3_5_moe_text"] = OF_FAMILY["qwen3_5_text"] | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
OF_FAMILY["qwen3_next"] = OF_FAMILY["qwen3_5_moe_text"] | {
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
ROPE_KEYS = ("factor", "low_freq_factor", "original_max_position_embeddings")
# Values that people and tools have written: of another type, in two places, or of another model.
ODD: list[dict[str, Any]] = [
    {"rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}, "rope_scaling": LLAMA3},
    {"rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"full_attention": {"rope_theta": 2e4, "rope_type": "default"}}},
    {"rope_scaling": {"factor": 8.0}},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": LLAMA3, "original_max_position_embeddings": 128},
    {"rope_theta": 10000},
    {"rope_theta": "1e4"},
    {"num_key_value_heads": 0},
    {"num_key_value_heads": 32},
    {"head_dim": 8},
    {"head_dim": "8"},
    {"head_dim": 0},
    {"rms_norm_eps": "1e-5"},
    {"rms_norm_eps": 1},
    {"tie_word_embeddings": False},
    {"tie_word_embeddings": "false"},
    {"tie_word_embeddings": 1},
    {"eos_token_id": 7},
    {"eos_token_id": "7"},
    {"eos_token_id": [7, [9]]},
    {"max_position_embeddings": "512"},
    {"max_position_embeddings": 8192},
    {"sliding_window": 64},
    {"use_sliding_window": True},
    {"layer_types": ["sliding_attention"] * 4},
    {"attention_bias": True},
    {"attention_bias": "false"},
    {"hidden_act": "gelu"},
    {"norm_topk_prob": False},
    {"norm_topk_prob": "true"},
    {"decoder_sparse_step": 0},
    {"mlp_only_layers": [0, 3]},
    {"n_shared_experts": 0},
    {"first_k_dense_replace": 0},
    {"mlp_layer_types": ["dense"] * 4},
    {"routed_scaling_factor": 2},
    {"qk_norm": False},
    {"use_qk_norm": 1},
    {"layer_types": ["full_attention", "linear_attention", "full_attention", "full_attention"]},
    {"layer_types": ["full_attention", "linear_attention"]},
    {"layer_types": ["full_attention", "linear_attention", "full_attention", "sliding_attention"]},
    {"full_attention_interval": 3},
    {"linear_num_value_heads": 5},
    {"linear_num_key_heads": 0},
    {"partial_rotary_factor": 0.75},
    {"no_rope_layers": [1, 0, 0, 1]},
    {"no_rope_layers": [1, 0]},
    {"no_rope_layers": []},
    {"no_rope_layers": None},
    {"no_rope_layer_interval": 0},
    {"no_rope_layer_interval": 1},
    {"attention_out_bias": True},
    {"mlp_bias": True},
    {"rotary_dim": 6},
    {"rotary_dim": 4, "partial_rotary_factor": 0.5},
    {"partial_rotary_factor": "0.5"},
    {"rope_parameters": {"rope_theta": 2e4, "rope_type": "default", "partial_rotary_factor": 0.75}},
]


def theirs(directory: Path, config: dict[str, Any]) -> dict[str, Any] | str:
    """What decides the numbers of the model that transformers builds, without weights; or why it builds none."""
    (directory / "config.json").write_text(json.dumps(config))
    try:
        hf: Any = AutoConfig.from_pretrained(directory)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(hf)
    except Exception as error:  # whatever it raises for a value of a wrong type
        return f"{type(error).__name__}: {error}"
    attentions = [getattr(layer, "self_attn", None) for layer in model.model.layers]
    attention, rope = next((a for a in attentions if a is not None), None), dict(hf.rope_parameters)
    has_window = hasattr(type(hf), "sliding_window") and getattr(hf, "use_sliding_window", True)
    window = hf.sliding_window if has_window else None
    ids = hf.eos_token_id if isinstance(hf.eos_token_id, list) else [hf.eos_token_id]
    facts = {
        "layers": len(model.model.layers),
        "embedding": tuple(model.model.embed_tokens.weight.shape),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "o_proj": tuple(attention.o_proj.weight.shape) if attention else None,
        "biases": attention is not None and attention.o_proj.bias is not None,
        "eps": getattr(model.model.norm, "variance_epsilon", None) or model.model.norm.eps,
        "attends": tuple(a is not None for a in attentions),
        "rotary": tuple(bool(getattr(a, "use_rope", True)) for a in attentions),
        "tied": hf.tie_word_embeddings,
        "activation": hf.hidden_act,
        "window": window if window and window < hf.max_position_embeddings else None,
        "eos": tuple(sorted(token for token in ids if token is not None)),
        "positions": hf.max_position_embeddings,
        "rope": (rope.pop("rope_theta"), rope.pop("rope_type"), *(rope.get(key) for key in ROPE_KEYS)),
        "turned": 2 * len(model.model.rotary_emb.inv_freq),
    }
    if hf.model_type == "gpt_oss":
        facts["window"] = tuple(kind == "sliding_attention" and hf.sliding_window for kind in hf.layer_types)
    if facts["rope"][1] == "yarn":
        facts["positions"] = max(facts["positions"], int(hf.rope_parameters["factor"] * facts["rope"][4]))
    mixtures = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    if mixtures:
        router = getattr(mixtures[0], "gate", None) or mixtures[0].router
        of = {**vars(router), **vars(mixtures[0])}
        facts["mixtures"] = tuple(hasattr(layer.mlp, "experts") for layer in model.model.layers)
        facts["router"] = (of["top_k"], of.get("norm_topk_prob", True), of.get("n_group", 1), of.get("topk_group", 1))
        facts["scale"] = of.get("routed_scaling_factor", 1.0)
    return facts


def ours(config: dict[str, Any]) -> dict[str, Any] | str:
    """The same facts of the shape that scalerl reads; or why it refuses the config.json."""
    try:
        shape = ModelShape.from_config(config)
    except ValueError as error:
        return str(error)
    sizes = family_of(shape).hf_shapes(shape)
    scaling = shape.rope_scaling or {"rope_type": "default"}
    attends = tuple(not linear for linear in shape.linear_layers) or (True,) * shape.num_layers
    o_proj = f"model.layers.{attends.index(True)}.self_attn.o_proj.weight" if any(attends) else None
    facts = {
        "layers": shape.num_layers,
        "embedding": (shape.vocab_size, shape.hidden_size),
        # transformers counts a router's bias among the buffers.
        "parameters": sum(math.prod(size) for name, size in sizes.items() if not name.endswith("correction_bias")),
        "o_proj": sizes[o_proj] if o_proj else None,
        "attends": attends,
        "rotary": tuple(not is_nope for is_nope in shape.nope_layers) or (True,) * shape.num_layers,
        "biases": shape.linear_bias,
        "eps": shape.norm_eps,
        "tied": shape.tie_word_embeddings,
        "activation": "silu",
        "window": tuple(is_sliding and shape.sliding_window for is_sliding in shape.sliding_layers) or None,
        "eos": shape.eos_token_ids,
        "positions": shape.max_position_embeddings,
        "rope": (shape.rope_theta, scaling["rope_type"], *(scaling.get(key) for key in ROPE_KEYS)),
        "turned": shape.qk_rope_head_dim or shape.rotary_dim,
    }
    if any(shape.moe_layers):
        facts["mixtures"] = shape.moe_layers
        facts["router"] = (shape.num_experts_per_token, shape.router_normalizes)
        facts["router"] += (shape.router_groups, shape.router_top_groups)
        facts["scale"] = shape.router_scale
    return facts


def disagreements(directory: Path, label: str, config: dict[str, Any], *, must_read: bool = False) -> Iterator[str]:
    here = ours(config)
    if isinstance(here, str):
        if must_read:
            yield f"{label}: refused: {here}"
        return
    there = theirs(directory, config)
    if isinstance(there, str):
        yield f"{label}: read, transformers: {there}"
        return
    # A rope without a type has no factor, whatever else is written.
    if there["rope"][1] == "default":
        there["rope"] = (*there["rope"][:2], None, None, None)
    yield from (
        f"{label}: {fact} {here.get(fact)}, transformers: {there[fact]}"
        for fact in there
        if there[fact] != here.get(fact)
    )


# Those of models with a vision tower are in test_released.py.
OF_TEXT = [name for name, family in FAMILIES.items() if not family.text_config]


@pytest.mark.parametrize("family", OF_TEXT)
def test_odd_config_is_what_transformers_makes_of_it(tmp_path, family):
    """Keys left out, null, of another type, in two places: refused, or the model that transformers builds."""
    config = BASE | OF_FAMILY[family] | {"model_type": family}
    wrong = list(disagreements(tmp_path, "whole", config, must_read=True))
    for key in config.keys() - {"model_type", "pad_token_id"}:
        rest = {name: value for name, value in config.items() if name != key}
        # A value that decides the numbers is refused, or the family's default.
        wrong += disagreements(tmp_path, f"without {key}", rest, must_read=key in FAMILIES[family].defaults)
        # transformers reads null as 0 where the head's size of these is missing, and fails later.
        if key != "head_dim" or family not in ("qwen3_moe", "glm4", "glm4_moe"):
            wrong += disagreements(tmp_path, f"{key} null", config | {key: None})
    for change in ODD:
        wrong += disagreements(tmp_path, str(change), config | change)
    assert wrong == []


@pytest.mark.parametrize("family", OF_TEXT)
def test_every_default_is_tested(family):
    """A default that no config.json of the test leaves out would not be compared."""
    assert FAMILIES[family].defaults.keys() - (BASE | OF_FAMILY[family]).keys() <= {"head_dim"}
    assert set(REQUIRED_KEYS.values()) <= BASE.keys()


@pytest.mark.parametrize("key", ["tie_word_embeddings", "rms_norm_eps", "num_key_value_heads", "eos_token_id"])
def test_values_of_another_type_are_refused_by_key_and_value(key):
    config = BASE | {"model_type": "llama", key: "x y"}
    with pytest.raises(ValueError, match=f"{key} is 'x y', not "):
        ModelShape.from_config(config)


# --- files ---


def store(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def other_head(path: Path) -> None:
    store(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1.0}))


def same_head(path: Path) -> None:
    store(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))


def shards(path: Path, *, keep_single: bool = False, num_extra: int = 0) -> None:
    """Splits the file in two; num_extra: tensors of the first that are, with other numbers, in the second too."""
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, members in parts.items():
        extra = {n: tensors[n] * 2 for n in names[:num_extra]} if file.startswith("model-2") else {}
        save_file(extra | {n: tensors[n] for n in members}, path / file, metadata={"format": "pt"})
    write_index(path, {n: file for file, members in parts.items() for n in members})
    if not keep_single:
        (path / "model.safetensors").unlink()


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def index_of_the_single_file(path: Path) -> None:
    write_index(path, dict.fromkeys(load_file(path / "model.safetensors"), "model.safetensors"))


def left_over_shards(path: Path) -> None:
    shards(path, keep_single=True)
    store(path, lambda t: t.update({name: tensor + 1.0 for name, tensor in t.items()}))


def left_over_index(path: Path) -> None:
    shards(path, keep_single=True)
    for file in path.glob("model-*"):
        file.unlink()


def absent_shard(path: Path) -> None:
    shards(path)
    (path / "model-2-of-2.safetensors").unlink()


def damaged(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-100])


def as_integers(path: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    store(path, lambda t: t.update({name: (t[name] * 10).to(torch.int8)}))


def untied(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))


def of_an_adapter(path: Path) -> None:
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "somewhere/else"}))


def other_weights_file(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    (path / "model.safetensors").rename(path / "other.safetensors")
    make_tiny_model(path / "new", hidden_size=16, num_layers=1, vocab_size=260, tied=True, seed=1)
    (path / "new" / "model.safetensors").rename(path / "model.safetensors")


DIRECTORIES: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "as it was saved": (lambda path: None, None),
    "a head beside the tied flag that is the embedding": (same_head, None),
    "another head beside the tied flag": (other_head, "lm_head.weight .* tie_word_embeddings"),
    "no head, and not tied": (untied, "missing lm_head.weight"),
    "shards": (shards, None),
    "an index of the single file": (index_of_the_single_file, None),
    "an index of another save, with its shards": (left_over_shards, "model.safetensors.*index.json"),
    "an index of another save": (left_over_index, "model.safetensors.*index.json"),
    "an index of nothing": (lambda path: write_index(path, {}), "names no file"),
    "a tensor in two shards": (lambda path: shards(path, num_extra=1), "model-2-of-2.safetensors too"),
    "integers for weights": (as_integers, "o_proj.weight is stored as I8"),
    "an adapter": (of_an_adapter, "adapter_config.json"),
    "weights that config.json names": (other_weights_file, "transformers_weights 'other.safetensors'"),
    "a pickle": (
        lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
        r"only pytorch_model\.bin.*refused.*save_pretrained",
    ),
    "no weights": (
        lambda path: (path / "model.safetensors").unlink(),
        r"neither model\.safetensors nor model\.safetensors\.index\.json",
    ),
    "a shard without an index": (
        lambda path: (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors"),
        r"model-00001-of-00002\.safetensors there, but no model.*index",
    ),
    "a shard that is absent": (absent_shard, r"not there: model-2-of-2\.safetensors"),
    "a damaged file": (damaged, r"model\.safetensors cannot be read .*download the model again"),
    "an index that is none": (
        lambda path: (path / "model.safetensors.index.json").write_text("{}"),
        "is not a safetensors index",
    ),
    "a tensor that no layer has": (
        lambda path: store(path, lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(1)})),
        "unexpected model.layers.1.mlp.up_proj.weight",
    ),
    "buffers of old versions": (
        lambda path: store(path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)})),
        None,
    ),
}


@pytest.mark.parametrize("name", DIRECTORIES)
def test_odd_directory_is_what_transformers_makes_of_it(tmp_path, name):
    change, refused = DIRECTORIES[name]
    path = make_tiny_model(tmp_path / "m", hidden_size=16, num_layers=1, vocab_size=260, tied=True)
    change(path)

    def read() -> tuple[ModelShape, dict[str, torch.Tensor]]:
        shape = ModelShape.from_hf(path)
        with HFWeights(path) as weights:
            weights.check(family_of(shape), shape)
            weights.check_head(tied=shape.tie_word_embeddings)
            return shape, {tensor: weights.read(tensor)[:] for tensor in family_of(shape).hf_shapes(shape)}

    if refused is not None:
        with pytest.raises(ValueError, match=refused):
            read()
        return
    shape, tensors = read()
    model = AutoModelForCausalLM.from_pretrained(path)
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert shape == ModelShape.from_hf(tmp_path / "again")
    assert tensors.keys() == again.keys() and all(torch.equal(tensors[n], again[n]) for n in again)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without what transformers says about each odd config.json."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    yield
    transformers.logging.set_verbosity(verbosity)
