"""Check that a model can attend to as many tokens as its server is to be started for."""

from __future__ import annotations

import json
from pathlib import Path


def check_context_length(
    model_path: str | Path, max_model_len: int, keys: str = "data.max_prompt_length + data.max_response_length"
) -> None:
    """Raises ValueError when prompt + response (`max_model_len` tokens) exceed the model's positions.

    keys: configuration keys that set max_model_len, for the error.
    """
    path = Path(model_path) / "config.json"
    if not path.exists():
        return  # the server will report what is wrong with the directory
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    limit = config.get("max_position_embeddings")
    # A scaling factor (yarn, linear, ...) extends the positions, by an amount that the engine decides.
    if limit is not None and "factor" not in rope and max_model_len > limit:
        raise ValueError(
            f"{keys} = {max_model_len} tokens exceed max_position_embeddings={limit} of {path}; lower them"
        )
