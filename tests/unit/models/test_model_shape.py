"""config.json -> ModelShape: both spellings, and what is refused; test_against_transformers.py compares the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Qwen3Config

from scalerl.models import ModelShape, family_of

SMALL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}
OF_EXPERTS = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write(path: Path, config: dict, generation: dict | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3_ROPE}, "dtype": "bfloat16"},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}, "torch_dtype": "bfloat16"},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}, "torch_dtype": "torch.bfloat16"},
    ],
)
def test_old_and_new_spelling_mean_the_same(tmp_path, spelling):
    shape = ModelShape.from_hf(write(tmp_path, SMALL | spelling))
    assert shape.rope_theta == 5e5
    assert shape.rope_scaling == {"rope_type": "llama3", **LLAMA3_ROPE}
    assert shape.dtype == "bfloat16"


def test_eos_tokens_of_both_files(tmp_path):
    path = write(tmp_path, SMALL | {"eos_token_id": 9}, {"eos_token_id": [3, 9]})
    assert ModelShape.from_hf(path).eos_token_ids == (3, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2' is not supported; supported: deepseek_v3, .*, kimi_k2, .*, qwen3_moe",
        ),
        ({"model_type": "mistral", "sliding_window": 128}, "sliding_window 128 .* max_position_embeddings 256"),
        ({"model_type": "mixtral"}, "num_local_experts is missing; num_experts_per_tok is missing"),
        (OF_EXPERTS["mixtral"] | {"model_type": "mixtral", "num_experts_per_tok": 9}, "9 exceeds the 8 experts"),
        (OF_EXPERTS["deepseek_v3"] | {"model_type": "deepseek_v3", "n_group": 3}, "8 experts cannot be chosen from"),
        (OF_EXPERTS["deepseek_v3"] | {"model_type": "deepseek_v3", "n_group": 8}, "too small"),
        (OF_EXPERTS["deepseek_v3"] | {"model_type": "deepseek_v3", "kv_lora_rank": None}, "kv_lora_rank is None"),
        (
            OF_EXPERTS["deepseek_v3"] | {"model_type": "deepseek_v3", "topk_method": "greedy"},
            "topk_method 'greedy' is not supported .only 'noaux_tc'",
        ),
        # As MiniMax-M2's published config.json has it.
        (
            OF_EXPERTS["mixtral"] | {"model_type": "minimax_m2", "rotary_dim": 64},
            "rotary_dim is 64.* and partial_rotary_factor is 1.0 of head_dim 128.*set partial_rotary_factor to 0.5, "
            "or rotary_dim to 128",
        ),
        (
            OF_EXPERTS["mixtral"] | {"model_type": "minimax_m2", "partial_rotary_factor": 0.5},
            "rotary_dim is None.* and partial_rotary_factor is 0.5 .* or rotary_dim to 64",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1, 2]}, "no_rope_layers .1, 2. is not a list of 2 numbers"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers .1. is not a list of 2 numbers"),
        ({"model_type": "seed_oss", "attention_out_bias": True}, "attention_out_bias True"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type 'linear'.*default, llama3, yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type yarn needs original_max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope type llama3 needs low_freq_factor"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_parameters.rope_theta is '1e6', not a number"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "rope_scaling.factor is '4', not a number"),
        ({"rope_scaling": {"type": ["yarn"]}}, "rope_scaling.type is .'yarn'., not a text"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', not an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config .fp8."),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"dtype": "float64"}, "dtype 'float64'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "32"}, "hidden_size is '32', not a positive integer"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, change, message):
    with pytest.raises(ValueError, match=message) as caught:
        ModelShape.from_hf(write(tmp_path, SMALL | change))
    assert str(tmp_path / "config.json") in str(caught.value)


def test_all_problems_in_one_error(tmp_path):
    path = write(tmp_path, SMALL | {"mlp_bias": True, "attention_bias": True, "hidden_act": "gelu"})
    with pytest.raises(ValueError, match=r"attention_bias.*mlp_bias.*hidden_act"):
        ModelShape.from_hf(path)


def test_directories_without_a_config(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        ModelShape.from_hf(tmp_path)
    with pytest.raises(ValueError, match="is not a directory"):
        ModelShape.from_hf(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        ModelShape.from_hf(tmp_path)


def test_a_window_as_long_as_the_context_is_none():
    assert ModelShape.from_config(SMALL | {"model_type": "mistral", "sliding_window": 256}).model_type == "mistral"


def test_router_of_deepseek():
    groups = {"n_group": 4, "topk_group": 2}
    shape = ModelShape.from_config(SMALL | OF_EXPERTS["deepseek_v3"] | {"model_type": "deepseek_v3"} | groups)
    assert (shape.router_score, shape.router_has_bias) == ("sigmoid", True)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_number_of_experts_as_both_transformers_write_it(key):
    config = SMALL | OF_EXPERTS["qwen3_moe"] | {"model_type": "qwen3_moe", "norm_topk_prob": True}
    del config["num_experts"]
    shape = ModelShape.from_config(config | {key: 6})
    assert (shape.num_experts, shape.router_normalizes) == (6, True)


def test_yarn():
    """Latent attention has scales of its own; those of a dense model are read in different ways: it may have none."""
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64}
    dense = ModelShape.from_config(SMALL | {"rope_scaling": yarn, "max_position_embeddings": 128})
    assert dense.max_position_embeddings == 40 * 64
    assert dense.rope_scaling == {
        "rope_type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
    }
    scaled = yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}
    with pytest.raises(ValueError, match=r"rope type yarn with mscale 1\.0 is not supported: leave it out"):
        ModelShape.from_config(SMALL | {"rope_scaling": scaled})
    latent = SMALL | OF_EXPERTS["deepseek_v3"] | {"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1}
    shape = ModelShape.from_config(latent | {"rope_scaling": scaled})
    assert shape.rope_scaling["rope_type"] == "yarn"
    assert (shape.rope_scaling["beta_fast"], shape.rope_scaling["mscale_all_dim"]) == (32.0, 1.0)


def test_family_of_takes_mappings_and_objects():
    assert family_of({"model_type": "qwen3"}) is family_of(Qwen3Config())
    with pytest.raises(ValueError, match="model_type None is not supported"):
        family_of({})
