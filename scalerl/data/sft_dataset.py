"""Conversations for supervised fine-tuning: token ids, and the mask of the tokens to learn, from messages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.config.schema import SFTDataConfig
from scalerl.data.chat import Conversation, encode, render, require_chat_template
from scalerl.data.files import DataFile, read_chunks, resolve_files
from scalerl.data.messages import MessagesDigest, check_messages, check_tools
from scalerl.data.problems import DataError, FileProblems
from scalerl.data.ragged import RaggedArray
from scalerl.data.truncation import truncate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRUNCATIONS = ("error", "left", "right")


@dataclass(frozen=True, slots=True)
class SFTRow:
    """One tokenized conversation.  loss_mask: 1 where the token is learned, one entry per token of input_ids."""

    input_ids: list[int]
    loss_mask: list[int]


class SFTDataset:
    """Conversations of one or many parquet, json or jsonl files, in the order of files and rows.

    loss_mask is 1 on the assistant's words: in every assistant turn from the end of the generation prompt to the
    end-of-turn token. A turn's bounds are found by rendering the conversation before it with the generation prompt,
    and through it without. The tokens of both must be prefixes of the whole conversation's tokens; otherwise the
    template rewrites earlier turns, and the row is an error. Where the rendered turn lacks the end of the generation
    prompt (<think>), the turn begins behind what both have.

    Column config.tools_key, which may be missing, has function schemas of a row, as a list or as JSON text, or null.
    A file may be a URL (local_copy.py), whose copy is kept in config.cache_dir.
    A conversation over config.max_length tokens: config.truncation error | left | right.
    Raises DataError, naming file, row and column of all problems of the first file that has any.
    """

    def __init__(
        self,
        data_files: str | os.PathLike | Sequence[str | os.PathLike],
        tokenizer: PreTrainedTokenizerBase,
        config: SFTDataConfig,
    ) -> None:
        if config.truncation not in TRUNCATIONS:
            raise ValueError(f"data.truncation={config.truncation!r}: use one of {', '.join(TRUNCATIONS)}")
        if config.max_length < 2:
            raise ValueError(f"data.max_length={config.max_length}: use at least 2 tokens")
        require_chat_template(tokenizer)
        files = resolve_files(data_files, config.cache_dir)
        self.files = [file.name for file in files]
        digest = MessagesDigest()
        rows = [row for file in files for row in _read_file(file, tokenizer, config, digest)]
        self.digest = digest.hexdigest()
        if not rows:
            raise DataError([f"{', '.join(self.files)}: no rows; give files with at least one row"])
        self._tokens = RaggedArray([tokens for tokens, _ in rows], np.int32)
        self._loss_mask = RaggedArray([mask for _, mask in rows], np.int8)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, row: int) -> SFTRow:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is not in 0..{len(self) - 1}")
        return SFTRow(self._tokens[row].tolist(), self._loss_mask[row].tolist())


def _read_file(
    file: DataFile, tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig, digest: MessagesDigest
) -> list[tuple[np.ndarray, np.ndarray]]:
    problems = FileProblems(file.name)
    column = config.messages_key
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    overlong: dict[int, int] = {}
    for chunk in read_chunks(file.path, [column], problems, optional=[config.tools_key]):
        if problems.full:
            break
        for row, values in chunk:
            if column not in values:
                continue  # The file lacks the column, which is in `problems`.
            messages = check_messages(values[column], row, column, problems)
            if messages is None or not _check_turns(messages, row, column, problems):
                continue
            tools = check_tools(values.get(config.tools_key), row, config.tools_key, problems)
            masked = _tokenize(Conversation(messages, tools), row, tokenizer, config, problems)
            if masked is None:
                continue
            tokens, mask = masked
            if len(tokens) > config.max_length and config.truncation == "error":
                overlong[row] = len(tokens)
                continue
            tokens, mask = (truncate(part, config.max_length, config.truncation) for part in (tokens, mask))
            if not any(mask):
                problem = (
                    f"no assistant token in the {config.max_length} tokens kept by data.truncation={config.truncation}"
                )
                advice = "raise data.max_length, change data.truncation, or remove the row"
                problems.add(problem, advice, row=row, column=column)
                continue
            rows.append((np.asarray(tokens, np.int32), np.asarray(mask, np.int8)))
            digest.add(messages)
    for row, num_tokens in overlong.items():
        problem = f"a conversation longer than data.max_length={config.max_length} tokens"
        advice = f"set data.max_length={max(overlong.values())} (the longest), or data.truncation=left|right"
        problems.add(problem, advice, row=row, column=column, value=f"{num_tokens} tokens")
    problems.raise_if_any()
    return rows


def _check_turns(messages: list[dict[str, Any]], row: int, column: str, problems: FileProblems) -> bool:
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        problems.add("no assistant message", "remove the row: it has nothing to learn", row=row, column=column)
    elif roles[0] == "assistant":
        problem = "an assistant message before any other"
        problems.add(problem, "start the conversation with a system or user message", row=row, column=column)
    else:
        return True
    return False


def _tokenize(
    conversation: Conversation,
    row: int,
    tokenizer: PreTrainedTokenizerBase,
    config: SFTDataConfig,
    problems: FileProblems,
) -> tuple[list[int], list[int]] | None:
    """Tokens and loss mask of a conversation, or None with the reason added to `problems`."""
    column = config.messages_key
    messages, tools = conversation
    rendered = partial(render, tokenizer, options=config.chat_template_kwargs, tools=tools)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        texts = [rendered(messages, add_generation_prompt=False)]
        for turn in turns:
            texts.append(rendered(messages[:turn], add_generation_prompt=True))
            texts.append(rendered(messages[: turn + 1], add_generation_prompt=False))
    except Exception as error:  # a chat template is a program of the model's author: it raises anything
        problem = f"messages that the chat template refuses ({type(error).__name__}: {error})"
        problems.add(problem, "correct the messages, or use another template", row=row, column=column)
        return None
    whole, *prefixes = encode(tokenizer, texts)
    mask = [0] * len(whole)
    for turn, before, through in zip(turns, prefixes[::2], prefixes[1::2], strict=True):
        start = len(before)
        if whole[: len(through)] == through and whole[: len(before)] != before:
            start = _start_of_turn(rendered(messages[:turn], add_generation_prompt=False), whole, before, tokenizer)
        if start is None or whole[: len(through)] != through:
            what = "before" if start is None else "through"
            problem = f"a conversation whose tokens {what} assistant message {turn} change when the rest is added"
            advice = (
                "the chat template rewrites earlier turns, so no mask of the assistant's tokens exists; "
                "use a template that only appends, or split the row into conversations with one assistant message"
            )
            problems.add(problem, advice, row=row, column=column)
            return None
        end = _end_of_turn(through, start, tokenizer)
        mask[start:end] = [1] * (end - start)
    return whole, mask


def _start_of_turn(history: str, whole: list[int], before: list[int], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The start of an assistant turn whose rendering lacks the end of its generation prompt (an opening <think>).

    The turn starts behind the part of the generation prompt that the rendering has. None if it has no part of it, or if
    the rendering of the turns before differs.
    """
    (without_prompt,) = encode(tokenizer, [history])
    start = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(whole))
    unchanged = whole[: len(without_prompt)] == without_prompt
    return start if unchanged and start > len(without_prompt) else None


def _end_of_turn(tokens: list[int], start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """End of the assistant turn tokens[start:]: after its last eos if only whitespace follows, which is not sampled."""
    eos = tokenizer.eos_token_id
    if eos is None or eos not in tokens[start:]:
        return len(tokens)
    end = len(tokens) - tokens[::-1].index(eos)
    return len(tokens) if str(tokenizer.decode(tokens[end:])).strip() else end
