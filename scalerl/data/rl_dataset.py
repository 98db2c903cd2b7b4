"""Prompts for reinforcement learning: their token ids and what rewards need, from files with the five columns."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.config.schema import DataConfig
from scalerl.data.chat import Conversation, require_chat_template
from scalerl.data.files import DataFile, read_chunks, resolve_files
from scalerl.data.problems import DataError, FileProblems
from scalerl.data.prompt_tokens import PromptTokenizer
from scalerl.data.ragged import PackedObjects, RaggedArray, truncate
from scalerl.data.row_checks import MessagesDigest, PromptColumns, PromptFields, check_prompt_rows
from scalerl.data.unknown_text import UnknownRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from scalerl.data.pictures import PictureProcessor, PictureSource

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of a data set.  uid: its position.  prompt_length_before: tokens before truncation.

    reward_style: rule (a reward function scores it), model or judge (a reward model or a judge, where the run has
        one), or another name.
    images: the content of each file, or its absolute path; input_ids has as many placeholders as they take.
    tools: function schemas of the row; empty where it has none of its own.
    """

    uid: int
    input_ids: list[int]
    prompt_length_before: int
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, Any]]
    reward_style: str
    images: list[PictureSource] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)


# input_ids, prompt_length_before, the other fields of PromptRow.
_KeptRow = tuple[np.ndarray, int, PromptFields]


class RLHFDataset:
    """Prompts of one or many parquet, json or jsonl files, in the order of files and rows, tokenized at construction.

    Columns (all required; config renames the first two):
        data_source (config.reward_fn_key): str, picks the reward rule.
        prompt (config.prompt_key): list of {"role", "content"}, at least one.
        ability: str.
        reward_model: {"style": str, "ground_truth": any}; ground_truth may be null only if style is not "rule".
        extra_info: dict or null.
        images (config.image_key; may be missing): list of bytes, paths relative to the file, or dicts with bytes or
            path; or null. The messages have <image>, or a part of type image, for each. Without a processor a row with
            images is a problem.
        videos (config.video_key; may be missing): a row with videos is a problem.
        tools (config.tools_key; may be missing): function schemas, as a list or as JSON text, or null.

    A file may be a URL (local_copy.py), whose copy is kept in config.cache_dir.
    A prompt over config.max_prompt_length tokens is dropped and counted in `num_filtered` if
    config.filter_overlong_prompts, else config.truncation decides: error | left | right | middle. One with images is
    not truncated.
    config.filter_overlong_prompts_workers processes tokenize; the rows do not depend on their number.
    `max_samples`: number of rows to keep, the first ones after filtering; -1 keeps all.
    `processor`: of a model that takes images.

    Raises DataError, naming file, row and column of all problems of the first file that has any.
    """

    def __init__(
        self,
        data_files: str | os.PathLike | Sequence[str | os.PathLike],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        processor: PictureProcessor | None = None,
        max_samples: int = -1,
    ) -> None:
        require_chat_template(tokenizer)

        files = resolve_files(data_files, config.cache_dir)
        self.files = [file.name for file in files]
        self.num_filtered = 0
        columns = PromptColumns(
            config.reward_fn_key,
            config.prompt_key,
            config.image_key,
            config.video_key,
            config.tools_key,
            processor is not None,
        )
        rows: list[_KeptRow] = []
        with PromptTokenizer(
            tokenizer, config.filter_overlong_prompts_workers, config.chat_template_kwargs, processor
        ) as prompt_tokenizer:
            for file in files:
                room = None if max_samples == -1 else max_samples - len(rows)
                if room == 0:
                    break
                rows.extend(self._read_file(file, columns, prompt_tokenizer, config, room))
        if not rows:
            raise DataError([self._why_empty(config)])
        digest = MessagesDigest()
        for _, _, fields in rows:
            digest.add(fields.messages, fields.images)
        self.digest = digest.hexdigest()
        self._tokens = RaggedArray([tokens for tokens, *_ in rows], np.int32)
        self._others = PackedObjects((num_tokens, *fields) for _, num_tokens, fields in rows)
        if self.num_filtered:
            log.warning(
                "%d of %d prompts dropped: longer than data.max_prompt_length=%d tokens",
                self.num_filtered, self.num_filtered + len(self), config.max_prompt_length,
            )  # fmt: skip

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, uid: int) -> PromptRow:
        # Not len(self), which a derived class may change.
        if not 0 <= uid < len(self._tokens):
            raise IndexError(f"uid {uid} is not in 0..{len(self._tokens) - 1}")
        return PromptRow(int(uid), self._tokens[uid].tolist(), *self._others[uid])

    def _read_file(
        self,
        file: DataFile,
        columns: PromptColumns,
        tokenizer: PromptTokenizer,
        config: DataConfig,
        room: int | None,
    ) -> list[_KeptRow]:
        """The kept rows of one file, at most `room`; the rows beyond are checked too."""
        problems = FileProblems(file.name)
        kept: list[_KeptRow] = []
        overlong: dict[int, int] = {}
        overlong_with_images: dict[int, int] = {}
        unknown = UnknownRows()

        def checked() -> Iterator[tuple[list[tuple[int, PromptFields]], list[Conversation]]]:
            for chunk in read_chunks(file.path, columns.names, problems, optional=columns.optional):
                rows = check_prompt_rows(chunk, columns, problems, Path(file.path).parent)
                if problems.full:
                    return
                if not problems and room != len(kept):
                    yield rows, [Conversation(fields.messages, fields.tools, fields.images) for _, fields in rows]

        for rows, token_lists in tokenizer.each(checked()):
            if room == len(kept):
                continue
            for (row, fields), prompt in zip(rows, token_lists, strict=True):
                if room == len(kept):
                    break
                if not prompt.is_usable(row, columns.prompt, problems, columns.images):
                    continue
                tokens = prompt.input_ids
                num_tokens = len(tokens)
                if num_tokens > config.max_prompt_length:
                    if config.filter_overlong_prompts:
                        self.num_filtered += 1
                        continue
                    if fields.images or config.truncation == "error":
                        (overlong_with_images if fields.images else overlong)[row] = num_tokens
                        continue
                    tokens = np.asarray(
                        truncate(tokens.tolist(), config.max_prompt_length, config.truncation), np.int32
                    )
                unknown.add(row, num_tokens, prompt.unknown, prompt.left_out, prompt.special)
                kept.append((tokens, num_tokens, fields))
        _add_overlong(
            overlong, columns.prompt, config.max_prompt_length, problems, "data.truncation=left|right|middle, "
        )
        # A picture cannot be cut.
        _add_overlong(overlong_with_images, columns.prompt, config.max_prompt_length, problems)
        unknown.report(file.name, columns.prompt, problems, allow=config.unknown_tokens == "allow")
        problems.raise_if_any()
        return kept

    def _why_empty(self, config: DataConfig) -> str:
        files = ", ".join(self.files)
        if self.num_filtered:
            return (
                f"{files}: all {self.num_filtered} prompts are longer than data.max_prompt_length="
                f"{config.max_prompt_length} tokens and filtered; raise it, or use data.truncation"
            )
        return f"{files}: no rows; give files with at least one row"


def _add_overlong(
    overlong: dict[int, int], column: str, max_prompt_length: int, problems: FileProblems, cut: str = ""
) -> None:
    """Adds the problem of rows with too many tokens.  cut: the advice to truncate them, with a comma after it."""
    if not overlong:
        return
    problem = f"a prompt longer than data.max_prompt_length={max_prompt_length} tokens"
    advice = (
        f"set data.max_prompt_length={max(overlong.values())} (the longest), {cut}or data.filter_overlong_prompts=true"
    )
    for row, num_tokens in overlong.items():
        problems.add(problem, advice, row=row, column=column, value=f"{num_tokens} tokens")
