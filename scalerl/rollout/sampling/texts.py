"""Samples as text, for dumps, for the table of validations and for a reward model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.batch.data_proto import DataProto, Jagged

if TYPE_CHECKING:
    from scalerl.data import PromptRow


def texts_of(
    tokenizer: Any, batch: DataProto, prompts: Mapping[int, PromptRow], with_special_tokens: bool
) -> list[tuple[str, str, str]]:
    """Decodes each row to (prompt, response, ground truth).  prompts: row of the data set -> prompt."""
    texts = decoded(tokenizer, batch.tokens["input_ids"], batch.samples["prompt_length"], with_special_tokens)
    truths = [prompts[uid].ground_truth for uid in batch.samples["prompt_uid"].tolist()]
    return [(*text, _as_text(truth)) for text, truth in zip(texts, truths, strict=True)]


def decoded(
    tokenizer: Any, input_ids: Jagged, prompt_lengths: np.ndarray, with_special_tokens: bool = True
) -> list[tuple[str, str]]:
    """Decodes each row to (prompt, response).  prompt_lengths: [S], tokens of each row before its response."""
    decode = partial(tokenizer.decode, skip_special_tokens=not with_special_tokens)
    texts = []
    for row, prompt_length in enumerate(prompt_lengths.tolist()):
        ids = input_ids[row].tolist()
        texts.append((decode(ids[:prompt_length]), decode(ids[prompt_length:])))
    return texts


def _as_text(ground_truth: Any) -> str:
    """A ground truth as text, JSON if it is no string; None is empty."""
    if ground_truth is None or isinstance(ground_truth, str):
        return ground_truth or ""
    return json.dumps(ground_truth, ensure_ascii=False, default=str)
