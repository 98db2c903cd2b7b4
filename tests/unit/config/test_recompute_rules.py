"""Recompute keys that do not go together with the model are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl.config import ModelSizes, recompute_violations
from scalerl.config.schema import MegatronConfig

MODEL = {"num_attention_heads": 16, "num_kv_heads": 8, "num_layers": 12, "ffn_hidden_size": 3072}
MIXTURE = {"num_experts": 8, "moe_ffn_hidden_size": 64}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def against(model: dict[str, Any], **megatron: Any) -> list[str]:
    return recompute_violations(ModelSizes(**{**MODEL, **model}), MegatronConfig(**megatron), prefix="megatron")


@pytest.mark.parametrize(
    ("model", "megatron", "texts"),
    [
        ({}, {**FULL, "recompute_num_layers": 5}, ["recompute_num_layers = 5", "has 12;", "one of 1, 2, 3, 4, 6, 12"]),
        ({}, {**FULL, "recompute_num_layers": 4, "pipeline_model_parallel_size": 2}, ["has 6;", "one of 1, 2, 3, 6"]),
        (
            {},
            {
                **FULL,
                "recompute_num_layers": 3,
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 3,
            },
            ["has 2;", "one of 1, 2"],
        ),
        (
            {},
            {
                **FULL,
                "recompute_num_layers": 4,
                "pipeline_model_parallel_size": 3,
                "num_layers_in_first_pipeline_stage": 2,
                "num_layers_in_last_pipeline_stage": 4,
            },
            ["has 2 or 4 or 6;", "one of 1, 2"],
        ),
        (
            {},
            {**FULL, "recompute_method": "block", "recompute_num_layers": 13},
            ["recompute_num_layers = 13", "at most 12 layers", "recompute_num_layers=12 or less"],
        ),
        (
            {},
            {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe", "mla_up_proj"]},
            ["the model has no moe and no mla_up_proj", "recompute_modules=[mlp]"],
        ),
        (
            MIXTURE,
            {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]},
            ["no shared_experts", "recompute_modules=[core_attn]"],
        ),
    ],
)
def test_what_the_model_does_not_allow(model: dict[str, Any], megatron: dict[str, Any], texts: list[str]) -> None:
    (violation,) = against(model, **megatron)
    assert all(text in violation for text in texts), violation


@pytest.mark.parametrize(
    ("model", "megatron"),
    [
        ({}, {}),
        ({}, {**FULL, "recompute_num_layers": 6, "pipeline_model_parallel_size": 2}),
        ({}, {**FULL, "recompute_method": "block", "recompute_num_layers": 5}),
        (MIXTURE, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
        (
            {**MIXTURE, "shared_expert_ffn_hidden_size": 64, "latent_attention": True},
            {"recompute_granularity": "selective", "recompute_modules": ["moe", "shared_experts", "mla_up_proj"]},
        ),
    ],
)
def test_what_the_model_allows(model: dict[str, Any], megatron: dict[str, Any]) -> None:
    assert against(model, **megatron) == []
