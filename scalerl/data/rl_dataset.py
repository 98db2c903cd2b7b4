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
    """One prompt. uid: its position in the data set.  prompt_length_before: tokens before truncation.

    reward_style: rule (a reward function scores it), model (a reward model, where the run has one), or another name.
    """

    uid: int
    input_ids: list[int]
    prompt_length_before: int
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, Any]]
    reward_style: str


# input_ids, then the fields of PromptRow after it.
_KeptRow = tuple[np.ndarray, int, str, Any, dict[str, Any], list[dict[str, Any]], str]


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
        rows: list[_KeptRow] = []
        for path in self.files:
            room = None if max_samples == -1 else max_samples - len(rows)
            if room == 0:
                break
            rows.extend(self._read_file(path, tokenizer, config, room))
        if not rows:
            raise DataError([self._why_empty(config)])
        self._tokens = RaggedArray([tokens for tokens, *_ in rows], np.int32)
        self._others = PackedObjects(others for _, *others in rows)
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

    def _read_file(
        self, path: str, tokenizer: PreTrainedTokenizerBase, config: DataConfig, room: int | None
    ) -> list[_KeptRow]:
        """The kept rows of one file, `room` at most; every row is checked, also those beyond."""
        columns = _Columns(config.reward_fn_key, config.prompt_key)
        problems = FileProblems(path)
        kept: list[_KeptRow] = []
        overlong: dict[int, int] = {}
        for chunk in read_chunks(path, columns.names, problems):
            rows = _check_rows(chunk, columns, problems)
            if problems.full:
                break
            if problems or room == len(kept):
                continue
            for row, fields, tokens in _tokenize(rows, tokenizer, columns.prompt, problems):
                if room == len(kept):
                    break
                num_tokens = len(tokens)
                if num_tokens > config.max_prompt_length:
                    if config.filter_overlong_prompts:
                        self.num_filtered += 1
                        continue
                    if config.truncation == "error":
                        overlong[row] = num_tokens
                        continue
                    tokens = truncate(tokens, config.max_prompt_length, config.truncation)
                data_source, messages, ground_truth, extra_info, style = fields
                # An array: a list of Python integers is ten times larger while the other rows are read.
                ids = np.asarray(tokens, np.int32)
                kept.append((ids, num_tokens, data_source, ground_truth, extra_info, messages, style))
        _add_overlong(overlong, columns.prompt, config.max_prompt_length, problems)
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


@dataclass(frozen=True)
class _Columns:
    data_source: str
    prompt: str

    @property
    def names(self) -> list[str]:
        return [self.data_source, self.prompt, "ability", "reward_model", "extra_info"]


# data_source, messages, ground_truth, extra_info, reward_style
_Fields = tuple[str, list[dict[str, Any]], Any, dict[str, Any], str]


def _check_rows(chunk: Chunk, columns: _Columns, problems: FileProblems) -> list[tuple[int, _Fields]]:
    rows = []
    for row, values in chunk:
        if len(values) < len(columns.names):
            # The file lacks a column, which is in `problems`: check the others.
            values = {**dict.fromkeys(columns.names, _ABSENT), **values}
        _check_text(values[columns.data_source], row, columns.data_source, problems)
        _check_text(values["ability"], row, "ability", problems, may_be_empty=True)
        _check_reward_model(values["reward_model"], row, problems)
        _check_extra_info(values["extra_info"], row, problems)
        messages = None
        if values[columns.prompt] is not _ABSENT:
            messages = check_messages(values[columns.prompt], row, columns.prompt, problems)
        if not problems:
            fields = values[columns.data_source], messages, values["reward_model"]["ground_truth"]
            rows.append((row, (*fields, values["extra_info"] or {}, values["reward_model"]["style"])))
    return rows


# Stands for the value of a column that the file does not have.
_ABSENT = object()


def _check_text(value: Any, row: int, column: str, problems: FileProblems, *, may_be_empty: bool = False) -> None:
    if value is _ABSENT:
        return
    if not isinstance(value, str):
        problems.add(f"{type_name(value)}, not text", "write text", row=row, column=column, value=excerpt(value))
    elif not value and not may_be_empty:
        problems.add("empty text", "name the source of the row", row=row, column=column)


def _check_reward_model(value: Any, row: int, problems: FileProblems) -> None:
    if value is _ABSENT:
        return
    place: dict[str, Any] = {"row": row, "column": "reward_model"}
    if not isinstance(value, dict):
        problems.add(f"{type_name(value)}, not a dict", _REWARD_SHAPE, **place, value=excerpt(value))
        return
    for key in ("style", "ground_truth"):
        if key not in value:
            problems.add(f"no key '{key}' (it has: {', '.join(map(str, value)) or 'none'})", _REWARD_SHAPE, **place)
    style = value.get("style", "rule")
    if not isinstance(style, str) or not style:
        problems.add(f"{type_name(style)} as style, not a name", _REWARD_SHAPE, **place, value=excerpt(style))
    if style == "rule" and "ground_truth" in value and value["ground_truth"] is None:
        problems.add("null as ground_truth", "give the answer that the rule compares with", **place)


def _check_extra_info(value: Any, row: int, problems: FileProblems) -> None:
    if value is not _ABSENT and value is not None and not isinstance(value, dict):
        found = f"{type_name(value)}, not a dict"
        problems.add(found, "write a dict, or null", row=row, column="extra_info", value=excerpt(value))


def _tokenize(
    rows: list[tuple[int, _Fields]], tokenizer: PreTrainedTokenizerBase, column: str, problems: FileProblems
) -> Iterator[tuple[int, _Fields, list[int]]]:
    rendered = []
    for row, fields in rows:
        try:
            rendered.append((row, fields, render(tokenizer, fields[1], add_generation_prompt=True)))
        except Exception as error:  # a chat template is a program of the model's author: it raises anything
            found = f"messages that the chat template refuses ({type(error).__name__}: {error})"
            problems.add(found, "correct the messages, or use another template", row=row, column=column)
    token_lists = encode(tokenizer, [text for *_, text in rendered])
    for (row, fields, _), tokens in zip(rendered, token_lists, strict=True):
        if tokens:
            yield row, fields, tokens
        else:
            problems.add("messages that the chat template renders to nothing", "correct it", row=row, column=column)


def _add_overlong(overlong: dict[int, int], column: str, max_prompt_length: int, problems: FileProblems) -> None:
    if not overlong:
        return
    found = f"a prompt longer than data.max_prompt_length={max_prompt_length} tokens"
    advice = (
        f"set data.max_prompt_length={max(overlong.values())} (the longest), data.truncation=left|right|middle, "
        "or data.filter_overlong_prompts=true"
    )
    for row, num_tokens in overlong.items():
        problems.add(found, advice, row=row, column=column, value=f"{num_tokens} tokens")
