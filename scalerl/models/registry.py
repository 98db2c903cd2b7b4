"""The table of all model families by model_type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scalerl.models import (
    deepseek_v3,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    qwen2,
    qwen2_5_vl,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    qwen3_vl_moe,
    seed_oss,
    smollm3,
)
from scalerl.models.table import Family

_MODULES = (
    qwen3,
    qwen2,
    llama,
    mistral,
    qwen3_moe,
    mixtral,
    deepseek_v3,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
    gpt_oss,
    seed_oss,
    smollm3,
    minimax_m2,
    qwen2_5_vl,
    qwen3_vl,
    qwen3_vl_moe,
)
_RELEASED = (qwen3_5.RELEASED, qwen3_5_moe.RELEASED)
FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (*(module.FAMILY for module in _MODULES), *_RELEASED)
}
# Other model_types of config.json, of models whose tensors and sizes are those of a family.
ALIASES = {"kimi_k2": "deepseek_v3"}


def family_named(model_type: str | None) -> Family | None:
    """The family of this model_type, or None."""
    return FAMILIES.get(ALIASES.get(model_type or "", model_type or ""))


def family_of(hf_config: Any) -> Family:
    """The family of a config.json (mapping), a transformers config or a ModelShape (anything with model_type).

    Raises ValueError naming the supported model types.
    """
    model_type = hf_config.get("model_type") if isinstance(hf_config, Mapping) else hf_config.model_type
    family = family_named(model_type)
    if family is None:
        supported = ", ".join(sorted([*FAMILIES, *ALIASES]))
        raise ValueError(f"model_type {model_type!r} is not supported; supported: {supported}")
    return family
