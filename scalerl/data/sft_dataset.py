"""Conversations for supervised fine-tuning: token ids, and the mask of the tokens to learn, from messages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.config.schema import SFTDataConfig
from scalerl.data.chat import Conversation, SpecialTokens, encode, left_out, render, require_chat_template
from scalerl.data.files import DataFile, read_chunks, resolve_files
from scalerl.data.pictures import PictureError, PictureProcessor, PictureSource, expand, text_of
from scalerl.data.problems import DataError, FileProblems
from scalerl.data.ragged import PackedObjects, RaggedArray, truncate
from scalerl.data.row_checks import MessagesDigest, check_images, check_messages, check_tools
from scalerl.data.unknown_text import UnknownRows, UnknownText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Marks of a thought, in messages and in the chat templates of models that think.
_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class SFTRow:
    """One tokenized conversation.  loss_mask: 1 where the token is learned, one entry per token of input_ids.

    images: the content of each file, or its absolute path; input_ids has as many placeholders as they take.
    picture_patches: of each image.
    """

    input_ids: list[int]
    loss_mask: list[int]
    images: list[PictureSource] = field(default_factory=list)
    picture_patches: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Sample:
    """A conversation of a row.  images: the first ones of the row, as far as its messages go.  counts: their tokens."""

    input_ids: list[int]
    loss_mask: list[int]
    images: Sequence[PictureSource] = ()
    counts: Sequence[int] = ()


class SFTDataset:
    """Conversations of one or many parquet, json or jsonl files, in the order of files and rows.

    loss_mask is 1 on the assistant's words: in every assistant turn from the end of the generation prompt to the
    end-of-turn token. A turn's bounds are found by rendering the conversation before it with the generation prompt,
    and through it without. Where the rendered turn lacks the end of the generation prompt (<think>), the turn begins
    behind what both have.

    A row is one conversation, unless its chat template rewrites earlier turns (Qwen3's and DeepSeek-R1's drop their
    thoughts): then a turn is learned in the conversation that ends with it, which is what a policy sees and says
    there, and the row becomes as many conversations as that takes. A thought that the template does not even show in
    the last turn is learned as a continuation of the generation prompt. num_rows: the rows of the files.

    Column config.tools_key, which may be missing, has function schemas of a row, as a list or as JSON text, or null.
    Columns config.image_key and config.video_key are as those of `RLHFDataset`. processor: of a model that takes
    images, which it is asked for again when a row is used.
    A file may be a URL (local_copy.py), whose copy is kept in config.cache_dir.
    A conversation over config.max_length tokens: config.truncation error | left | right; one with images is not
    truncated.
    Raises DataError, naming file, row and column of all problems of the first file that has any.
    """

    def __init__(
        self,
        data_files: str | os.PathLike | Sequence[str | os.PathLike],
        tokenizer: PreTrainedTokenizerBase,
        config: SFTDataConfig,
        processor: PictureProcessor | None = None,
    ) -> None:
        require_chat_template(tokenizer)
        self.processor = processor
        files = resolve_files(data_files, config.cache_dir)
        self.files = [file.name for file in files]
        digest = MessagesDigest()
        by_row = [row for file in files for row in _read_file(file, tokenizer, config, digest, processor)]
        self.digest = digest.hexdigest()
        if not by_row:
            raise DataError([f"{', '.join(self.files)}: no rows; give files with at least one row"])
        self.num_rows = len(by_row)
        rows = [sample for samples in by_row for sample in samples]
        self._tokens = RaggedArray([row.input_ids for row in rows], np.int32)
        self._loss_mask = RaggedArray([row.loss_mask for row in rows], np.int8)
        patches = 0 if processor is None else processor.vision.merge_size**2
        self._images = PackedObjects((list(row.images), [patches * count for count in row.counts]) for row in rows)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, row: int) -> SFTRow:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is not in 0..{len(self) - 1}")
        return SFTRow(self._tokens[row].tolist(), self._loss_mask[row].tolist(), *self._images[row])


def _read_file(
    file: DataFile,
    tokenizer: PreTrainedTokenizerBase,
    config: SFTDataConfig,
    digest: MessagesDigest,
    processor: PictureProcessor | None,
) -> list[list[_Sample]]:
    """The conversations of each row."""
    problems = FileProblems(file.name)
    column = config.messages_key
    rows: list[list[_Sample]] = []
    overlong: dict[int, int] = {}
    optional, directory = [config.tools_key, config.image_key, config.video_key], Path(file.path).parent
    unknown, unknown_text, special = UnknownRows(), UnknownText(tokenizer), SpecialTokens(tokenizer)
    for chunk in read_chunks(file.path, [column], problems, optional=optional):
        if problems.full:
            break
        for row, values in chunk:
            if column not in values:
                continue  # The file lacks the column, which is in `problems`.
            sees_images = processor is not None
            messages = check_messages(values[column], row, column, problems, may_have_parts=sees_images)
            images = check_images(
                values, row, config.image_key, config.video_key, problems, directory, sees_images=sees_images
            )
            if messages is None or images is None or not _check_turns(messages, row, column, problems):
                continue
            tools = check_tools(values.get(config.tools_key), row, config.tools_key, problems)
            conversation = Conversation(messages, tools, images)
            samples, pieces, missing = _tokenize(conversation, row, tokenizer, config, problems, unknown_text)
            if samples is None:
                continue
            try:
                if processor is not None:
                    processor.check_marks(messages, images)
                    samples = _with_pictures(samples, images, processor)
            except PictureError as error:
                problems.add(error.problem, error.advice, row=row, column=config.image_key)
                continue
            unknown.add(row, len(samples[-1].input_ids), pieces, missing, special.find(conversation.shown))
            longest = max(len(sample.input_ids) for sample in samples)
            if longest > config.max_length and (images or config.truncation == "error"):
                overlong[row] = longest
                continue
            cut = [_cut(sample, config) for sample in samples]
            cut = [sample for sample in cut if any(sample.loss_mask)]
            if not cut:
                problem = (
                    f"no assistant token in the {config.max_length} tokens kept by data.truncation={config.truncation}"
                )
                advice = "raise data.max_length, change data.truncation, or remove the row"
                problems.add(problem, advice, row=row, column=column)
                continue
            rows.append(cut)
            digest.add(messages, images)
    for row, num_tokens in overlong.items():
        problem = f"a conversation longer than data.max_length={config.max_length} tokens"
        cut = ", or data.truncation=left|right" if config.truncation == "error" else " (with images none is cut)"
        advice = f"set data.max_length={max(overlong.values())}, the longest{cut}"
        problems.add(problem, advice, row=row, column=column, value=f"{num_tokens} tokens")
    unknown.report(file.name, column, problems, allow=config.unknown_tokens == "allow")
    problems.raise_if_any()
    return rows


def _cut(sample: _Sample, config: SFTDataConfig) -> _Sample:
    ids, mask = (truncate(part, config.max_length, config.truncation) for part in (sample.input_ids, sample.loss_mask))
    # Lists of Python integers would take ten times the memory while other rows are read.
    return replace(sample, input_ids=np.asarray(ids, np.int32), loss_mask=np.asarray(mask, np.int8))


def _with_pictures(
    samples: Sequence[_Sample], images: Sequence[PictureSource], processor: PictureProcessor
) -> list[_Sample]:
    """The conversations with as many placeholders as their images take.  Raises PictureError as `processor.counts`.

    The last one has all messages, the others those up to a turn.
    """
    counts = processor.counts(samples[-1].input_ids, images)
    token_id, made = processor.vision.image_token_id, []
    for sample in samples:
        places = [place for place, token in enumerate(sample.input_ids) if token == token_id]
        if any(sample.loss_mask[place] for place in places):
            raise PictureError("an image in an assistant message", "show images in messages of other roles")
        own = counts[: len(places)]
        ids = expand(sample.input_ids, token_id, own)
        mask = list(sample.loss_mask)
        for place, count in zip(reversed(places), reversed(own), strict=True):
            mask[place : place + 1] = [0] * count
        made.append(_Sample(ids, mask, images[: len(places)], own))
    return made


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
    unknown: UnknownText,
) -> tuple[list[_Sample] | None, list[str], str]:
    """Tokens and loss mask of the conversations that a row becomes, or None with the reason added to `problems`; the
    pieces of its text that the tokenizer has no token for (`UnknownText.find`); and what of the row is left out
    (`chat.left_out`).

    It is one, with all turns, if the tokens through each turn are a prefix of the whole's.
    """
    column = config.messages_key
    messages, tools = conversation.shown, conversation.tools
    rendered = partial(render, tokenizer, options=config.chat_template_kwargs, tools=tools)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        texts = [rendered(messages, add_generation_prompt=False)]
        for turn in turns:
            before = rendered(messages[:turn], add_generation_prompt=True)
            through = rendered(messages[: turn + 1], add_generation_prompt=False)
            texts += [before, _with_thought(messages[turn], before, through)]
    except Exception as error:  # a chat template is a program of the model's author: it raises anything
        problem = f"messages that the chat template refuses ({type(error).__name__}: {error})"
        problems.add(problem, "correct the messages, or use another template", row=row, column=column)
        return None, [], ""
    whole, *prefixes = encode(tokenizer, texts)
    samples = [(whole, [0] * len(whole))]
    # From the last turn to the first: a turn is learned where the most of what follows it is learned too.
    for turn, before, through in list(zip(turns, prefixes[::2], prefixes[1::2], strict=True))[::-1]:
        if samples[-1][0][: len(through)] != through:
            samples.append((through, [0] * len(through)))
        start: int | None = len(before)
        if through[: len(before)] != before:
            start = _start_of_turn(rendered(messages[:turn], add_generation_prompt=False), through, before, tokenizer)
        if start is None:
            problem = f"a conversation whose tokens before assistant message {turn} change when the message is added"
            advice = (
                "the chat template writes what precedes an answer in another way than it asks for the answer, so the "
                "answer has no beginning; use another template (data.chat_template_path)"
            )
            problems.add(problem, advice, row=row, column=column)
            return None, [], ""
        end = _end_of_turn(through, start, tokenizer)
        samples[-1][1][start:end] = [1] * (end - start)
    # A turn whose thought the whole lacks has it in the text through it.
    pieces = max((unknown.find(text, ids) for text, ids in zip(texts, (whole, *prefixes), strict=True)), key=len)
    missing = left_out(conversation, texts[0], config.chat_template_kwargs)
    return [_Sample(tokens, mask) for tokens, mask in reversed(samples) if any(mask)], pieces, missing


def _with_thought(message: dict[str, Any], before: str, through: str) -> str:
    """The text through an assistant message, with the message's thought also if the template leaves that out.

    Then it is the text before the message, with the generation prompt, and what a policy that thinks would add to it.
    """
    content, thought = text_of(message), message.get("reasoning_content") or ""
    answer = content.rpartition(_END_OF_THOUGHT)[2]
    if not thought and _END_OF_THOUGHT in content:
        thought = content.rpartition(_END_OF_THOUGHT)[0].rpartition(_THOUGHT)[2]
    thought, answer = thought.strip(), answer.strip()
    same = next((i for i, (a, b) in enumerate(zip(before, through, strict=False)) if a != b), len(before))
    shown = through[same:]
    if not thought or not answer or shown.count(thought) > answer.count(thought) or answer not in shown:
        return through
    prompt = before.rstrip()
    if prompt.endswith(_END_OF_THOUGHT):  # The generation prompt says that there is no thought.
        return through
    opened = before if prompt.endswith(_THOUGHT) else f"{before}{_THOUGHT}\n"
    return f"{opened}{thought}\n{_END_OF_THOUGHT}\n\n{answer}{shown.rpartition(answer)[2]}"


def _start_of_turn(history: str, whole: list[int], before: list[int], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The start of an assistant turn whose rendering lacks the end of its generation prompt (an opening <think>).

    whole: tokens through the turn.  before: tokens of what precedes it, with the generation prompt. The
    turn starts behind the part of the generation prompt that the rendering has. None if it has no part of it, or if the
    rendering of the turns before differs.
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
