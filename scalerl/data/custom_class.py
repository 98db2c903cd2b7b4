"""Data sets of a class that the user wrote: loaded from its file, read once, and held like any other data set."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.base.user_code import UserCodeError, cause_of, defined_in, import_file
from scalerl.config.schema import CustomClassConfig, DataConfig
from scalerl.data.files import lone_surrogate
from scalerl.data.problems import DataError, FileProblems, excerpt, shown_rows, type_name
from scalerl.data.ragged import PackedObjects, RaggedArray
from scalerl.data.rl_dataset import PromptRow, RLHFDataset
from scalerl.data.row_checks import MessagesDigest, no_answer
from scalerl.data.unknown_text import UnknownRows, UnknownText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from scalerl.data.pictures import PictureProcessor

ARGUMENTS = ("data_files", "tokenizer", "config", "processor", "max_samples")
_METHODS = ("__len__", "__getitem__")


def create_rl_dataset(
    data_files: str | os.PathLike | Sequence[str | os.PathLike],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    max_samples: int = -1,
    processor: PictureProcessor | None = None,
) -> RLHFDataset | PromptTable:
    """Creates the data set that `config` asks for: an RLHFDataset, or the rows of config.custom_cls.

    processor: of a model that takes images.

    A class may draw from the generators that all code shares: they are seeded with config.seed while it is read.
    Raises DataError for wrong data, or a class that cannot be used.
    """
    if config.custom_cls.path is None and config.custom_cls.name is None:
        return RLHFDataset(data_files, tokenizer, config, processor, max_samples)
    cls = load_dataset_class(config.custom_cls)
    from scalerl.base.random_states import seeded_generators

    path = str(Path(config.custom_cls.path or "").expanduser().resolve())
    label = f"{cls.__name__} of {path}"
    try:
        # So that a run which goes on has the rows that it began with.
        with seeded_generators(config.seed):
            dataset = cls(data_files, tokenizer, config, processor, max_samples)
            rows = [dataset[i] for i in range(len(dataset))]
    except DataError:
        raise
    except Exception as error:  # the user's code raises what it likes
        raise DataError([f"{label}: cannot be read: {cause_of(error, path)}; correct the class"]) from error
    return PromptTable(rows, label, tokenizer, config, cls.__module__, processor)


def load_dataset_class(config: CustomClassConfig) -> type:
    """Loads the class config.name from the file config.path.

    Without a name it is the only class of the file that has __len__ and __getitem__. Raises DataError when there is no
    path, the file does not exist or import, or the name stands for no class with these methods that takes the arguments
    of RLHFDataset.
    """
    if config.path is None:
        raise DataError(
            [
                f"data.custom_cls.path = null: needed when data.custom_cls.name = {config.name}; set "
                "data.custom_cls.path=FILE.py, or data.custom_cls.name=null"
            ]
        )
    path = Path(config.path).expanduser()
    try:
        module = import_file(path, "data.custom_cls.path")
    except UserCodeError as error:
        raise DataError([str(error)]) from error
    own = [name for name, value in defined_in(module).items() if isinstance(value, type)]
    name = config.name or _only_dataset_class(module, path, own)
    cls = getattr(module, name, None)
    if not isinstance(cls, type):
        fault = f"defines '{name}' as {type_name(cls)}, not a class" if cls is not None else (
            f"does not define the class '{name}'"
        )  # fmt: skip
        near = difflib.get_close_matches(name, own, n=1)
        advice = f"set data.custom_cls.name={near[0]}" if near else "set data.custom_cls.name to a class of it"
        raise DataError([f"data.custom_cls.path={path} {fault} (its classes: {', '.join(own) or 'none'}); {advice}"])
    missing = [method for method in _METHODS if not callable(getattr(cls, method, None))]
    if missing:
        raise DataError(
            [
                f"{name} of data.custom_cls.path={path} has no {' and no '.join(missing)}; "
                "define both (__getitem__ returns a scalerl.data.PromptRow), or derive it from scalerl.data.RLHFDataset"
            ]
        )
    try:
        inspect.signature(cls).bind(*ARGUMENTS)
    except TypeError as error:
        raise DataError(
            [
                f"{name}{inspect.signature(cls)} of data.custom_cls.path={path} cannot be called with "
                f"{', '.join(ARGUMENTS)}: {error}; define __init__(self, {', '.join(ARGUMENTS)})"
            ]
        ) from None
    return cls


def _only_dataset_class(module: ModuleType, path: Path, own: list[str]) -> str:
    """The name of the one class in a file that can be a data set. Raises DataError where there is not one."""
    classes = ((name, getattr(module, name)) for name in own)
    fitting = [name for name, cls in classes if all(callable(getattr(cls, method, None)) for method in _METHODS)]
    if len(fitting) != 1:
        said = f"{', '.join(fitting)} could be it" if fitting else f"its classes: {', '.join(own) or 'none'}"
        advice = f"set data.custom_cls.name={fitting[0]}" if fitting else f"define one with {' and '.join(_METHODS)}"
        raise DataError([f"data.custom_cls.name = null: which class of data.custom_cls.path={path}? {said}; {advice}"])
    return fitting[0]


class PromptTable:
    """Rows read from a data set of any class, which can be sent to other processes without that class.

    A row's uid becomes its position. Raises DataError, naming row and field, for a field that is not as PromptRow
    documents it, for a prompt over data.max_prompt_length, and for values whose class is defined in the user's file.
    """

    def __init__(
        self,
        rows: Sequence[Any],
        label: str,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        module_name: str = "",
        processor: PictureProcessor | None = None,
    ) -> None:
        self.files = [label]
        if not rows:
            raise DataError([f"{label}: no rows; its __len__ must be at least 1"])
        rows_of_problem: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            for problem in _row_problems(row, len(tokenizer), config.max_prompt_length, module_name, processor):
                rows_of_problem.setdefault(problem, []).append(i)
        if rows_of_problem:
            shown = list(rows_of_problem.items())[:20]
            raise DataError([f"{label}: {shown_rows(numbers)}: {problem}" for problem, numbers in shown])
        self._count_unknown(rows, label, tokenizer, allow=config.unknown_tokens == "allow")
        digest = MessagesDigest()
        for row in rows:
            digest.add(row.messages, row.images)
        self.digest = digest.hexdigest()
        self._tokens = RaggedArray([row.input_ids for row in rows], np.int32)
        self._others = PackedObjects(_others(row) for row in rows)

    @staticmethod
    def _count_unknown(rows: Sequence[Any], label: str, tokenizer: PreTrainedTokenizerBase, *, allow: bool) -> None:
        ids, unknown, problems = UnknownText(tokenizer).ids, UnknownRows(), FileProblems(label)
        for i, row in enumerate(rows):
            names = [str(tokenizer.convert_ids_to_tokens(token)) for token in row.input_ids if token in ids]
            unknown.add(i, len(row.input_ids), names)
        unknown.report(label, "input_ids", problems, allow=allow)
        problems.raise_if_any()

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, uid: int) -> PromptRow:
        if not 0 <= uid < len(self):
            raise IndexError(f"uid {uid} is not in 0..{len(self) - 1}")
        return PromptRow(uid=int(uid), input_ids=self._tokens[uid].tolist(), **self._others[uid])


def _others(row: PromptRow) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(PromptRow) if field.name not in ("uid", "input_ids")]
    return {name: getattr(row, name) for name in names}


# Type of each field, and the description that errors give of it. ground_truth may be anything.
_TYPES = {
    "prompt_length_before": (int, "the number of tokens before truncation"),
    "data_source": (str, "the name of its source"),
    "extra_info": (dict, "a dict"),
    "messages": (list, "a list of messages"),
    "reward_style": (str, "rule, model, judge or another name"),
    "images": (list, "a list"),
    "tools": (list, "a list of function schemas"),
}


def _row_problems(
    row: Any, vocab_size: int, max_prompt_length: int, module_name: str, processor: PictureProcessor | None
) -> list[str]:
    if not isinstance(row, PromptRow):
        return [f"__getitem__ returns {type_name(row)}; return a scalerl.data.PromptRow"]
    problems = [
        f"{name} is {type_name(getattr(row, name))}, give {what}"
        for name, (kind, what) in _TYPES.items()
        if not isinstance(getattr(row, name), kind)
    ]
    if row.data_source == "":
        problems.append("data_source is empty, give the name of its source")
    if row.images and processor is None:
        problems.append("images: the model has no vision part; return none")
    if (what := no_answer(row.ground_truth)) is not None:
        problems.append(f"ground_truth has {what}, which is no answer; give text or a number")
    if (half := lone_surrogate(_others(row))) is not None:
        problems.append(f"texts hold {half}, half of a surrogate pair, which nothing can write; write whole characters")
    problems += _token_problems(row.input_ids, vocab_size, max_prompt_length)
    if processor is not None and not problems and (problem := processor.problem_of(row.input_ids, row.images)):
        problems.append(problem)
    if not problems:
        try:
            packed = pickle.dumps(_others(row))
        except Exception as error:  # __reduce__ of any class
            return [f"values cannot be sent to other processes ({type(error).__name__}: {error}); use plain values"]
        if module_name and module_name.encode() in packed:
            problems.append("values hold objects of classes of this file, which other processes lack; use plain values")
    return problems


def _token_problems(tokens: Any, vocab_size: int, max_prompt_length: int) -> list[str]:
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        return [f"input_ids is {type_name(tokens)}{' with other values' if isinstance(tokens, list) else ''}, "
                "give a list of integers"]  # fmt: skip
    if not tokens:
        return ["input_ids is empty, give at least one token"]
    outside = [token for token in tokens if not 0 <= token < vocab_size]
    if outside:
        return [f"input_ids holds {excerpt(outside[0])}, which is no token of the tokenizer (0..{vocab_size - 1})"]
    if len(tokens) > max_prompt_length:
        return [
            f"more tokens than data.max_prompt_length={max_prompt_length}; cut or leave out the prompt, or raise it"
        ]
    return []
