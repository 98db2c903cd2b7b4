"""What the keys of adapters have to do with the model, with a directory of peft, and with Megatron's keys."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerl.config import ConfigError, compose
from scalerl.config.errors import ErrorCollector
from scalerl.config.schema import AdapterKeys, MegatronConfig
from scalerl.models import ModelShape
from scalerl.models.adapters import Adapter, adapter_shapes, write_peft
from scalerl.trainer.checks.adapters import with_adapter
from scalerl.trainer.checks.models import learning_rate_line
from tests.tiny_models import make_tiny_model

SECTIONS = {"section": "model", "megatron_section": "megatron"}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
NEEDED = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m"]
MODEL = "actor_rollout_ref.model"


def adapted(shape: ModelShape, megatron: dict[str, Any] | None = None, **keys: Any) -> tuple[ModelShape, list[str]]:
    errors = ErrorCollector()
    keys = {"lora_rank": 2} | keys
    return with_adapter(errors, shape, AdapterKeys(**keys), MegatronConfig(**megatron or {}), **SECTIONS), (
        errors.violations
    )


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return ModelShape.from_hf(make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe"))


def test_a_shape_has_the_adapter_that_is_asked_for(mixture: ModelShape) -> None:
    shape, violations = adapted(mixture, lora_alpha=4.0, target_modules=["v_proj", "q_proj"])
    assert violations == [] and shape.adapter == Adapter(2, 4.0, ("q_proj", "v_proj"))
    assert adapted(mixture, lora_rank=0) == (mixture, [])
    rest = adapted(mixture, exclude_modules=["gate_proj", "up_proj"])[0]
    assert rest.adapter is not None and rest.adapter.targets == (*ATTENTION, "down_proj")


def test_projections_that_the_model_does_not_have_are_named_with_the_section(mixture: ModelShape) -> None:
    _, (violation,) = adapted(mixture, target_modules=["lm_head", "query"])
    assert violation.startswith("model: target_modules names 'lm_head': the head has no adapter; ")
    assert "'query'" in violation and violation.endswith(
        "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    )


@pytest.mark.parametrize(
    ("megatron", "key", "value", "of_attention_too"),
    [
        ({"tensor_model_parallel_size": 2}, "expert_tensor_parallel_size", 1, False),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size", 1, False),
        ({"moe_experts_impl": "transformer_engine"}, "moe_experts_impl", "torch", False),
        ({"moe_router_bias_update_rate": 0.1}, "moe_router_bias_update_rate", 0, True),
    ],
)
def test_what_adapters_do_not_go_with(
    mixture: ModelShape, megatron: dict[str, Any], key: str, value: Any, of_attention_too: bool
) -> None:
    _, (violation,) = adapted(mixture, megatron)
    assert violation.startswith(f"megatron.{key} = ") and violation.endswith(f"; set megatron.{key}={value}")
    assert "model.lora_rank = 2" in violation
    assert adapted(mixture, megatron | {key: value})[1] == []
    assert bool(adapted(mixture, megatron, target_modules=ATTENTION)[1]) == of_attention_too


def test_an_adapter_to_go_on_from_is_the_one_of_the_keys(mixture: ModelShape, tmp_path: Path) -> None:
    stored = Adapter(2, 16, tuple(ATTENTION))
    write_peft(tmp_path, stored, {n: torch.zeros(size) for n, size in adapter_shapes(mixture, stored).items()})
    path = str(tmp_path)
    assert adapted(mixture, lora_adapter_path=path, target_modules=ATTENTION)[1] == []
    _, violations = adapted(mixture, lora_adapter_path=path, lora_rank=4, lora_alpha=8.0)
    keys = ("lora_rank=2", "lora_alpha=16", "target_modules=[q_proj,k_proj,v_proj,o_proj]")
    assert [violation.rpartition("; set model.")[2].replace(", ", ",") for violation in violations] == list(keys)
    _, (violation,) = adapted(mixture, lora_adapter_path=str(tmp_path / "none"))
    assert "has no adapter_config.json" in violation


@pytest.mark.parametrize(
    "given", ["lora_alpha=8", "target_modules=[q_proj]", "exclude_modules=[q_proj]", "lora_adapter_path=p"]
)
def test_a_key_of_an_adapter_without_one_has_no_effect(given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("ppo", [*NEEDED, f"{MODEL}.{given}"])
    (violation,) = caught.value.violations
    assert violation.endswith(f"of no effect without an adapter, {MODEL}.lora_rank = 0; set {MODEL}.lora_rank=32")
    assert compose("ppo", [*NEEDED, f"{MODEL}.{given}", f"{MODEL}.lora_rank=32"])


def test_a_learning_rate_of_whole_weights_is_said_of_adapters(mixture: ModelShape) -> None:
    shape, _ = adapted(dataclasses.replace(mixture, hidden_size=4096, vocab_size=100_000))
    line = learning_rate_line("optim.lr", 1e-6, shape)
    assert line == "optim.lr = 1e-06: is for training all weights; adapters take about ten times as much, 1e-05"
    assert [learning_rate_line("optim.lr", lr, shape) for lr in (0.0, 1e-5)] == [None, None]
