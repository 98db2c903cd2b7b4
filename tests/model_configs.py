"""config.json of the models that configs/ trains, and transformers' models of them on the meta device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from scalerl.config import PPOConfig, compose
from scalerl.config.errors import ErrorCollector
from scalerl.models import ModelShape, without_quantization
from scalerl.models.registry import ALIASES
from scalerl.trainer.checks.models import trained_shape

MODELS = Path(__file__).parents[1] / "configs" / "models"
# The runs of configs/.
FILES = {path.stem: path for path in sorted(MODELS.parent.glob("*.yaml"))}
# Those of them that train a critic.
WITH_CRITIC = ("qwen3-8b-ppo-8",)
# Model directories that they name -> config.json in configs/models.
NAMES = {
    "Qwen3-0.6B": "qwen3-0.6b",
    "Qwen3-1.7B": "qwen3-1.7b",
    "Qwen3-8B": "qwen3-8b",
    "Qwen3-8B-YaRN": "qwen3-8b-yarn",
    "Qwen3-32B": "qwen3-32b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Llama-3.1-70B-Instruct": "llama-3.1-70b",
    "DeepSeek-V3": "deepseek-v3",
    "GLM-4-32B-0414": "glm-4-32b",
    "GLM-4.6": "glm-4.6",
    "Kimi-K2-Instruct": "kimi-k2",
    "Qwen3.5-35B-A3B": "qwen3.5-35b-a3b",
    "Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "MiniMax-M2": "minimax-m2",
    "Seed-OSS-36B-Instruct": "seed-oss-36b",
    "SmolLM3-3B": "smollm3-3b",
}
CONFIGS = {path.stem: path for path in sorted(MODELS.glob("*.json"))}


def read_config(name: str) -> dict[str, Any]:
    return json.loads(CONFIGS[name].read_text(encoding="utf-8"))


def model_of(run: str) -> str:
    """The name in CONFIGS of the model that a file of configs/ trains."""
    path = yaml.safe_load(FILES[run].read_text(encoding="utf-8"))["actor_rollout_ref"]["model"]["path"]
    return NAMES[Path(path).name]


@cache
def run_config(name: str) -> PPOConfig:
    """A file of configs/."""
    return compose("ppo", ["--config-dir", str(FILES[name].parent), "--config-name", name], rules=False)


@cache
def run_shapes(name: str) -> dict[str, ModelShape]:
    """The shapes of the models of a file of configs/, with their adapters, by role."""
    actor = ModelShape.from_config(read_config(model_of(name)))
    errors = ErrorCollector()
    shapes = {"actor": trained_shape(errors, run_config(name), actor), "ref": actor}
    assert errors.violations == []
    return shapes | ({"critic": actor.with_head("value")} if name in WITH_CRITIC else {})


@cache
def meta_model(name: str) -> PreTrainedModel:
    """transformers' own, without memory for its weights."""
    return meta_language_model(read_config(name))


def meta_language_model(config: Mapping[str, Any]) -> PreTrainedModel:
    """transformers' language model of a config.json as trainers have it: not quantized, whatever its files are.

    With a vision tower where the files have one, whose names are then those of the files.
    """
    with torch.device("meta"):
        if "text_config" in config:
            return getattr(transformers, config["architectures"][0])(AutoConfig.for_model(**config))
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**_known(config)))


def meta_value_model(config: Mapping[str, Any]) -> PreTrainedModel:
    """transformers' classifier of sequences, of a config.json that asks for one."""
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**_known(config)))


def _known(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json under the model_type by which transformers knows it."""
    model_type = config["model_type"]
    return without_quantization(config) | {"model_type": ALIASES.get(model_type, model_type)}


def model_directory(name: str, directory: Path) -> Path:
    """A directory with the config.json alone."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(CONFIGS[name].read_text(encoding="utf-8"), encoding="utf-8")
    return directory
