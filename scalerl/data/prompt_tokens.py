"""Tokenization of prompts, in this process or in several, in the order of the rows."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from scalerl.data.chat import Conversation, SpecialTokens, encode, left_out, render
from scalerl.data.pictures import PictureError, PictureProcessor
from scalerl.data.problems import DataError, FileProblems
from scalerl.data.unknown_text import UnknownText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

# Chunks that may wait per process, to be tokenized or to be read; bounds the memory.
_CHUNKS_PER_WORKER = 2


class Tokens(NamedTuple):
    """A prompt's token ids, int32.

    problem: the reason why the chat template refuses the messages, else "".  unknown: as `UnknownText.find` returns it.
    left_out: as `chat.left_out` returns it.  special: the special tokens that the messages' text has.
    picture_error: why its pictures cannot be used.
    """

    input_ids: np.ndarray
    problem: str = ""
    unknown: Sequence[str] = ()
    left_out: str = ""
    special: Sequence[str] = ()
    picture_error: PictureError | None = None

    def is_usable(self, row: int, column: str, problems: FileProblems, images: str = "images") -> bool:
        """Whether a prompt has tokens; adds the problem of its row where it has none.

        column, images: names of the columns of messages and of images.
        """
        if self.picture_error is not None:
            problems.add(self.picture_error.problem, self.picture_error.advice, row=row, column=images)
        elif self.problem:
            problem = f"messages that the chat template refuses ({self.problem})"
            problems.add(problem, "correct the messages, or use another template", row=row, column=column)
        elif not len(self.input_ids):
            problems.add("messages that the chat template renders to nothing", "correct it", row=row, column=column)
        else:
            return True
        return False


class PromptTokenizer:
    """Tokenizes prompts chunk by chunk.

    workers: number of processes that tokenize from the second chunk on; 1: this process does it all.
    options: data.chat_template_kwargs.  processor: of the pictures of the prompts.
    Use as a context manager: the processes end with the block.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        workers: int,
        options: Mapping[str, Any] | None = None,
        processor: PictureProcessor | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._processor = processor
        self._workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> PromptTokenizer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def each(self, chunks: Iterable[tuple[T, Sequence[Conversation]]]) -> Iterator[tuple[T, list[Tokens]]]:
        """Tokenizes each (rows, prompts) and yields (rows, tokens of each prompt), in the order of the chunks.

        A refused prompt has its reason in `Tokens.problem`. Raises DataError when a process is lost.
        """
        if self._workers == 1:
            for rows, prompts in chunks:
                yield rows, tokenize(self._tokenizer, prompts, self._options, self._processor)
            return
        waiting: deque[tuple[T, Future[list[Tokens]]]] = deque()
        try:
            for number, (rows, prompts) in enumerate(chunks):
                if number == 0:
                    # Most files have one chunk, which is done before a process would have started.
                    yield rows, tokenize(self._tokenizer, prompts, self._options, self._processor)
                    continue
                waiting.append((rows, self._start().submit(_tokenize_in_worker, prompts, self._options)))
                if len(waiting) >= self._workers * _CHUNKS_PER_WORKER:
                    yield _done(waiting)
            while waiting:
                yield _done(waiting)
        except BrokenProcessPool as error:
            raise DataError(
                [
                    f"one of {self._workers} tokenizing processes was lost ({error}); if memory ran out, lower "
                    "data.filter_overlong_prompts_workers"
                ]
            ) from error

    def _start(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._workers,
                # A fork would copy locks that threads of this process may hold.
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(self._tokenizer, self._processor),
            )
        return self._pool


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Conversation],
    options: Mapping[str, Any] | None = None,
    processor: PictureProcessor | None = None,
) -> list[Tokens]:
    """The tokens of each prompt with the generation prompt, or the chat template's error.

    options: data.chat_template_kwargs.  processor: counts the tokens of pictures.
    """
    refused: dict[int, str] = {}
    texts: list[str] = []
    seen: list[tuple[str, list[str]]] = []
    special = SpecialTokens(tokenizer)
    for number, prompt in enumerate(prompts):
        try:
            text = render(tokenizer, prompt.shown, add_generation_prompt=True, options=options, tools=prompt.tools)
        except Exception as error:  # a chat template is a program of the model's author: it raises anything
            refused[number] = f"{type(error).__name__}: {error}"
        else:
            texts.append(text)
            seen.append((left_out(prompt, text, options), special.find(prompt.shown)))
    unknown = UnknownText(tokenizer)
    # Arrays, because lists of Python integers would take ten times the memory while other rows are read.
    tokens = (
        Tokens(np.asarray(ids, np.int32), "", unknown.find(text, ids), *more)
        for text, ids, more in zip(texts, encode(tokenizer, texts), seen, strict=True)
    )
    nothing = np.empty(0, np.int32)
    made = [Tokens(nothing, refused[number]) if number in refused else next(tokens) for number in range(len(prompts))]
    if processor is None:
        return made
    return [_with_pictures(one, prompt, processor) for one, prompt in zip(made, prompts, strict=True)]


def _with_pictures(tokens: Tokens, prompt: Conversation, processor: PictureProcessor) -> Tokens:
    """The tokens with as many placeholders as the pictures of the prompt take."""
    if tokens.problem:
        return tokens
    try:
        processor.check_marks(prompt.messages, prompt.images)
        return tokens._replace(
            input_ids=np.asarray(processor.expand(tokens.input_ids.tolist(), prompt.images), np.int32)
        )
    except PictureError as error:
        return tokens._replace(picture_error=error)


def _done(waiting: deque[tuple[T, Future[list[Tokens]]]]) -> tuple[T, list[Tokens]]:
    rows, future = waiting.popleft()
    return rows, future.result()


_worker_tokenizer: PreTrainedTokenizerBase | None = None
_worker_processor: PictureProcessor | None = None


def _start_worker(tokenizer: PreTrainedTokenizerBase, processor: PictureProcessor | None = None) -> None:
    global _worker_tokenizer, _worker_processor
    # The processes are parallel already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer, _worker_processor = tokenizer, processor


def _tokenize_in_worker(prompts: Sequence[Conversation], options: Mapping[str, Any] | None) -> list[Tokens]:
    assert _worker_tokenizer is not None
    return tokenize(_worker_tokenizer, prompts, options, _worker_processor)
