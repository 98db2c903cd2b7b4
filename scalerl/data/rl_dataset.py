"""Prompts for reinforcement learning: files with the five columns in, token ids and what the reward needs out."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.config.schema import DataConfig
from scalerl.data.chat import encode, render, require_chat_template
from scalerl.data.files import Chunk, read_chunks, resolve_files
from scalerl.data.messages import check_messages
from scalerl.data.problems import DataError, FileProblems, excerpt, type_name
from scalerl.data.ragged import PackedObjects, RaggedArray
from scalerl.data.truncation import truncate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

log = logging.getLogger(__name__)

TRUNCATIONS = ("error", "left", "right", "middle")
_REWARD_SHAPE = 'write it as {"style": "rule", "ground_truth": "..."}'


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt. uid: its position in the data set.  prompt_length_before: tokens before truncation."""

    uid: int
    input_ids: list[int]
    prompt_length_before: int
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, Any]]


class RLHFDataset:
    """Prompts of one or many parquet, json or jsonl files, in the order of files and rows, tokenized at construction.

    Columns (all required; config renames the first two):
        data_source (config.reward_fn_key): str, picks the reward rule.
        prompt (config.prompt_key): list of {"role", "content"}, at least one.
        ability: str.
        reward_model: {"style": str, "ground_truth": any}; ground_truth may be null only if style is not "rule".
        extra_info: dict or null.

    A prompt over config.max_prompt_length tokens is dropped and counted in `num_filtered` if
    config.filter_overlong_prompts, else config.truncation decides: error | left | right | middle.
    `max_samples`: keep the first so many rows (after filtering); -1 keeps all.
    `processor` is there for callers that know the signature; images and videos are not supported and are refused.

    Raises DataError, naming file, row and column of all problems of the first file that has any.
    """

    def __init__(
        self,
        data_files: str | os.PathLike | Sequence[str | os.PathLike],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        processor: ProcessorMixin | None = None,
        max_samples: int = -1,
    ) -> None:
        if processor is not None:
            raise ValueError("processor: prompts with images or videos are not supported; pass None")
        if config.truncation not in TRUNCATIONS:
            raise ValueError(f"data.truncation={config.truncation!r}: use one of {', '.join(TRUNCATIONS)}")
        if config.max_prompt_length < 1:
            raise ValueError(f"data.max_prompt_length={config.max_prompt_length}: use at least 1 token")
        if max_samples != -1 and max_samples < 1:
            raise ValueError(f"max_samples={max_samples}: use at least 1, or -1 for all rows")
        require_chat_template(tokenizer)

        self.files = resolve_files(data_files)
        self.num_filtered = 0
        # Arguments of the two columns below, one entry per kept row.
        tokens: list[np.ndarray] = []
        others: list[tuple] = []
        for path in self.files:
            for row in self._read_file(path, tokenizer, config):
                if len(tokens) == max_samples:
                    break
                tokens.append(row[0])
                others.append(row[1:])
        if not tokens:
            raise DataError([self._why_empty(config)])
        self._tokens = RaggedArray(tokens, np.int32)
        self._others = PackedObjects(others)
        if self.num_filtered:
            log.warning(
                "%d of %d prompts dropped: longer than data.max_prompt_length=%d tokens",
                self.num_filtered, self.num_filtered + len(self), config.max_prompt_length,
            )  # fmt: skip

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, uid: int) -> PromptRow:
        if not 0 <= uid < len(self):
            raise IndexError(f"uid {uid} is not in 0..{len(self) - 1}")
        return PromptRow(int(uid), self._tokens[uid].tolist(), *self._others[uid])
