"""Which files of a Hugging Face model directory are weights, and which stand beside them."""

from __future__ import annotations

from pathlib import PurePath

# Suffixes of the files that are not weights: configuration, tokenizer, chat template, code.
_BESIDE_WEIGHTS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
# The files of a model that are fetched; other formats of the same weights are not.
FETCHED = ["*.safetensors", *(f"*{suffix}" for suffix in _BESIDE_WEIGHTS)]


def is_beside_weights(name: str) -> bool:
    """Whether a model with other weights needs the file of this name unchanged; it does not need the weights' index."""
    return PurePath(name).suffix in _BESIDE_WEIGHTS and not name.endswith(".index.json")
