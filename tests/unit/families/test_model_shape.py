"""config.json -> ModelShape: both spellings, defaults as transformers has them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from scalerl.families import ModelShape, family_of

CONFIG_CLASSES = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}
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


@pytest.mark.parametrize("model_type", CONFIG_CLASSES)
def test_agrees_with_transformers(tmp_path, model_type):
    hf = CONFIG_CLASSES[model_type](
        **{k: v for k, v in SMALL.items() if k != "model_type"}, eos_token_id=7, tie_word_embeddings=True
    )
    hf.save_pretrained(tmp_path)
    shape = ModelShape.from_hf(tmp_path)
    assert (shape.model_type, shape.num_layers, shape.hidden_size) == (model_type, 2, 32)
    assert (shape.num_attention_heads, shape.num_kv_heads) == (4, 2)
    assert shape.head_dim == getattr(hf, "head_dim", 32 // 4)
    assert (shape.ffn_hidden_size, shape.vocab_size, shape.max_position_embeddings) == (48, 100, 256)
    assert shape.rope_theta == hf.rope_parameters["rope_theta"]
    assert shape.rope_scaling is None
    assert shape.norm_eps == hf.rms_norm_eps
    assert shape.tie_word_embeddings is True
    assert shape.eos_token_ids == (7,)
    assert (shape.qk_norm, shape.qkv_bias) == (model_type == "qwen3", model_type == "qwen2")


@pytest.mark.parametrize("model_type", CONFIG_CLASSES)
def test_head_dim_that_is_not_written_is_what_transformers_takes(model_type):
    hf = CONFIG_CLASSES[model_type](**{k: v for k, v in SMALL.items() if k != "model_type"})
    expected = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    assert ModelShape.from_config(SMALL | {"model_type": model_type}).head_dim == expected


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
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: llama, qwen2, qwen3"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn'.*default, llama3"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope type llama3 needs low_freq_factor"),
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


def test_parallel_errors_name_every_size():
    shape = ModelShape.from_config(SMALL)
    assert shape.parallel_errors(2, 2) == []
    errors = "\n".join(shape.parallel_errors(5, 3))
    for part in ("num_attention_heads 4", "num_key_value_heads 2", "intermediate_size 48", "num_hidden_layers 2"):
        assert part in errors
    assert "tensor_model_parallel_size 5" in errors
    assert "pipeline_model_parallel_size 3" in errors


def test_family_of_takes_mappings_and_objects():
    assert family_of({"model_type": "qwen3"}) is family_of(Qwen3Config())
    with pytest.raises(ValueError, match="model_type None is not supported"):
        family_of({})
