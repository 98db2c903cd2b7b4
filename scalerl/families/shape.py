"""The numbers that fix a model's architecture, read from a Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl.families.registry import family_of
from scalerl.families.table import Family

# Key of config.json for each field that has no default.
REQUIRED_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
ROPE_TYPES = ("default", "llama3")
LLAMA3_ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelShape:
    """Architecture of a dense decoder.

    rope_scaling: None, or {"rope_type": "llama3", factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings}. dtype: of the stored weights: float32, bfloat16 or float16.
    eos_token_ids: of config.json and generation_config.json, ascending.
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
    rope_scaling: dict[str, Any] | None
    norm_eps: float
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...]

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
        """Same, from the parsed files."""
        family = family_of(config)
        problems = _missing_or_bad(config)
        if problems:
            raise ValueError("; ".join(problems))
        rope_theta, rope_scaling, problems = _rope(config)
        problems += _unsupported(config, family)
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            problems.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in DTYPES:
            problems.append(f"dtype {dtype!r} is not supported (one of {', '.join(DTYPES)})")
        if problems:
            raise ValueError("; ".join(problems))
        return cls(
            model_type=family.model_type,
            **{field: config[key] for field, key in REQUIRED_KEYS.items()},
            num_kv_heads=kv_heads,
            head_dim=config.get("head_dim") or family.default_head_dim or config["hidden_size"] // heads,
            max_position_embeddings=config.get("max_position_embeddings") or 32768,
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(config.get("tie_word_embeddings")),
            qk_norm=family.qk_norm,
            qkv_bias=family.qkv_bias,
            dtype=dtype,
            eos_token_ids=_eos_token_ids(config, generation or {}),
        )

    def parallel_errors(self, tp_size: int, pp_size: int) -> list[str]:
        """One sentence for every size that the layout does not divide; empty when it fits."""
        by_tp = {
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_kv_heads,
            "intermediate_size": self.ffn_hidden_size,
        }
        errors = [
            f"{key} {size} is not divisible by tensor_model_parallel_size {tp_size}"
            for key, size in by_tp.items()
            if size % tp_size
        ]
        if self.num_layers % pp_size:
            errors.append(
                f"num_hidden_layers {self.num_layers} is not divisible by pipeline_model_parallel_size {pp_size}"
            )
        return errors


def read_config(model_dir: str | Path) -> dict[str, Any]:
    """Parsed config.json. Raises ValueError when the directory or the file is missing or is not JSON."""
    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        raise ValueError(f"{model_dir} is not a directory; give a local Hugging Face model directory")
    return _read_json(model_dir / "config.json", required=True)


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


def _missing_or_bad(config: Mapping[str, Any]) -> list[str]:
    problems = []
    for key in REQUIRED_KEYS.values():
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(f"{key} is missing" if value is None else f"{key} is {value!r}, not a positive integer")
    return problems


def _rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None, list[str]]:
    # transformers 5: rope_parameters {rope_theta, rope_type}; 4: rope_theta beside rope_scaling {rope_type or type}.
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    rope_type = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    if rope_type not in ROPE_TYPES:
        problem = f"rope type {rope_type!r} is not supported (one of {', '.join(ROPE_TYPES)})"
        return float(theta), None, [problem]
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    problems = [] if partial == 1.0 else [f"partial_rotary_factor {partial} is not supported (only 1.0)"]
    if rope_type == "default":
        return float(theta), None, problems
    problems += [f"rope type llama3 needs {key}" for key in LLAMA3_ROPE_KEYS if rope.get(key) is None]
    return float(theta), {"rope_type": "llama3"} | {k: rope.get(k) for k in LLAMA3_ROPE_KEYS}, problems


def _unsupported(config: Mapping[str, Any], family: Family) -> list[str]:
    problems = [f"{key} {config[key]!r} is not supported" for key in family.refused if config.get(key)]
    layer_types = {t for t in config.get("layer_types") or () if t != "full_attention"}
    if layer_types:
        problems.append(f"layer_types {', '.join(sorted(layer_types))} is not supported (only full_attention)")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown method")
        problems.append(f"quantization_config ({method}): quantized weights are not supported; use the original model")
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act {config['hidden_act']!r} is not supported (only silu)")
    return problems


def _eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    ids: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))
