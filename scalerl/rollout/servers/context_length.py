"""Check that a model can attend to as many tokens as its server is to be started for."""

from __future__ import annotations

import json
from pathlib import Path

from scalerl.models.shape import max_positions, rope_entries


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
    rope = rope_entries(config)
    if config.get("max_position_embeddings") is None:
        return
    is_yarn = (rope.get("rope_type") or rope.get("type")) == "yarn"
    limit = max_positions(config)
    # Another factor (linear, dynamic, ...) extends the positions by an amount that the engine decides.
    if (is_yarn or "factor" not in rope) and max_model_len > limit:
        factor = ", extended by rope_scaling," if is_yarn else ""
        raise ValueError(
            f"{keys} = {max_model_len} tokens exceed max_position_embeddings={limit}{factor} of {path}; lower them"
        )
