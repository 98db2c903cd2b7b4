"""Which families there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scalerl.families import llama, qwen2, qwen3
from scalerl.families.table import Family

FAMILIES: dict[str, Family] = {f.model_type: f for f in (qwen3.FAMILY, qwen2.FAMILY, llama.FAMILY)}


def family_of(hf_config: Any) -> Family:
    """Family of a config.json (mapping), a transformers config or a ModelShape (anything with model_type).

    Raises ValueError naming the supported model types.
    """
    model_type = hf_config.get("model_type") if isinstance(hf_config, Mapping) else hf_config.model_type
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]
