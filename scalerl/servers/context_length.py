"""The tokens that a model can attend to, checked before a server is started for more."""

from __future__ import annotations

import json
from pathlib import Path


def check_context_length(
    model_path: str | Path, max_model_len: int, keys: str = "data.max_prompt_length + data.max_response_length"
) -> None:
    """ValueError when prompt + response (`max_model_len` tokens) do not fit into the model's positions.

    keys: what sets max_model_len, for the error.
    """
    path = Path(model_path) / "config.json"
    if not path.exists():
        return  # the server says what is wrong with the directory
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    limit = config.get("max_position_embeddings")
    # A scaling factor (yarn, linear, ...) extends the positions; how far is the engine's business.
    if limit is not None and "factor" not in rope and max_model_len > limit:
        raise ValueError(
            f"{keys} = {max_model_len} tokens exceed max_position_embeddings={limit} of {path}; lower them"
        )
