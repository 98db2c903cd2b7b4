"""Program that generates rows of a reasoning-gym task: `python -P reasoning_gym_process.py`, JSON in, JSON out."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
import os
import random
import sys
from typing import Any

import numpy as np
from reasoning_gym.factory import DATASETS, create_dataset  # pyright: ignore[reportMissingImports]  # an optional package

# Size and seed have options of the command; a mixture (composite) is a list of files, one per task.
_NOT_OPTIONS = ("seed", "size")
_NOT_TASKS = ("composite",)


class TaskError(Exception):
    """An error that the user can correct; its message is shown."""


def main() -> None:
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a task prints is not part of the reply
    request = json.load(sys.stdin)
    try:
        reply_body = generate(request["task"], request["options"], request["splits"])
    except TaskError as error:
        reply_body = {"error": str(error)}
    with reply:
        json.dump(reply_body, reply)


def generate(task: str, options: dict[str, Any], splits: list[dict[str, Any]]) -> dict[str, Any]:
    """Generates the rows of all splits, and counts the dropped ones by reason.

    Raises TaskError for a task that does not exist, options that it does not take, and a task that fails.
    """
    _check(task, options)
    rows: list[dict[str, str]] = []
    dropped: dict[str, int] = {}
    taken: dict[str, str] = {}
    category = ""
    for split in splits:
        name, size, missing = split["name"], split["size"], split["size"]
        for seed in split["seeds"]:
            dataset = _create(task, options, seed, size)
            category = dataset.category
            for index in range(size):
                if missing == 0:
                    break
                entry = _entry(dataset, task, index, seed)
                reason = _why_not(dataset, entry, name, taken)
                if reason is None:
                    taken[entry["question"]] = name
                    rows.append({"split": name, **_texts(entry, task, index)})
                    missing -= 1
                else:
                    dropped[reason] = dropped.get(reason, 0) + 1
    return {"category": category, "rows": rows, "dropped": dropped}


def _check(task: str, options: dict[str, Any]) -> None:
    tasks = [name for name in sorted(DATASETS) if name not in _NOT_TASKS]
    if task not in tasks:
        near = difflib.get_close_matches(task, tasks, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise TaskError(f"--task {task}: reasoning-gym has no such task; {hint}It has: {', '.join(tasks)}")
    known = [field.name for field in dataclasses.fields(DATASETS[task][1]) if field.name not in _NOT_OPTIONS]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TaskError(
            f"--option {', '.join(unknown)}: task {task} has no such option; it has: {', '.join(known) or 'none'}"
        )


def _create(task: str, options: dict[str, Any], seed: int, size: int) -> Any:
    # Some tasks draw from these as well.
    random.seed(seed)
    np.random.seed(seed)
    try:
        return create_dataset(task, **options, seed=seed, size=size)
    except Exception as error:  # mostly assertions on the options
        raise TaskError(
            f"task {task} cannot be made with {size} rows and options {options}: {_cause(error)}; change --size, "
            "--val-size or --option"
        ) from error


def _entry(dataset: Any, task: str, index: int, seed: int) -> dict[str, Any]:
    try:
        return dataset[index]
    except Exception as error:
        raise TaskError(
            f"task {task} failed on its row {index} (seed {seed}): {_cause(error)}; try another --seed or --option"
        ) from error


def _why_not(dataset: Any, entry: dict[str, Any], split: str, taken: dict[str, str]) -> str | None:
    other = taken.get(entry["question"])
    if other is not None:
        return "repeat an earlier row" if other == split else "are validation rows too"
    # The answer is None where many answers are right and the task does not give one.
    answer = entry["answer"]
    if answer is not None and not _is_right(dataset, str(answer).strip(), entry):
        return "are not scored 1 for their own answer"
    return None


def _is_right(dataset: Any, answer: str, entry: dict[str, Any]) -> bool:
    try:
        return dataset.score_answer(answer, entry) == 1
    except Exception:
        return False


def _texts(entry: dict[str, Any], task: str, index: int) -> dict[str, str]:
    """Question, answer and entry of a row as texts.

    entry is a Python literal, because scoring rules distinguish tuples from lists, and number keys from text keys.
    """
    plain = _plain(entry)
    text = repr(plain)
    try:
        same = ast.literal_eval(text) == plain
    except (ValueError, SyntaxError):
        same = False
    if not same:
        raise TaskError(f"task {task}: its row {index} holds more than text, numbers and lists: {text:.200}")
    answer = entry["answer"]
    return {"question": entry["question"], "answer": "" if answer is None else str(answer), "entry": text}


def _plain(value: Any) -> Any:
    """Converts subclasses of text and numbers (enumerations, numpy) to the plain types they are derived from."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, float) else value


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


if __name__ == "__main__":
    main()
