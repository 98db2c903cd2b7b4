"""Rows of responses to prompts that `scalerl eval` reads, from files of any tool, and their checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scalerl.data.problems import FileProblems, excerpt, type_name
from scalerl.data.row_checks import check_extra_info, check_ground_truth
from scalerl.data.tables import FileTable


@dataclass(frozen=True)
class ResponseColumns:
    """Names of the columns of responses; a file may lack prompt and extra_info."""

    responses: str = "responses"
    data_source: str = "data_source"
    reward_model: str = "reward_model"
    prompt: str = "prompt"
    extra_info: str = "extra_info"


@dataclass(frozen=True)
class ResponseRow:
    """One prompt and its responses.  row: its number over all files.  name: file and row, for messages."""

    row: int
    name: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] | None
    prompt: str
    responses: list[str]


def response_rows(tables: Sequence[FileTable], columns: ResponseColumns) -> Iterator[ResponseRow]:
    """Yields every row, in order.

    Raises DataError with the problems of the first file that has any, once that file is read.
    """
    for file in tables:
        problems = FileProblems(file.name)
        needed = [columns.responses, columns.data_source, columns.reward_model]
        for chunk in file.chunks(needed, problems, optional=[columns.prompt, columns.extra_info]):
            for row, values in chunk:
                response_row = _row_of(file, row, values, columns, problems)
                if response_row is not None:
                    yield response_row
            if problems.full:
                break
        problems.raise_if_any()


def _row_of(
    file: FileTable, row: int, values: dict[str, Any], columns: ResponseColumns, problems: FileProblems
) -> ResponseRow | None:
    responses = _responses(values[columns.responses], row, columns.responses, problems)
    source, reward = values[columns.data_source], values[columns.reward_model]
    if not isinstance(source, str) or not source:
        problem = f"{type_name(source)}, not the name of a source" if not isinstance(source, str) else "empty text"
        problems.add(problem, "write its name", row=row, column=columns.data_source, value=excerpt(source))
    _check_reward_model(reward, row, columns.reward_model, problems)
    extra_info = values.get(columns.extra_info)
    check_extra_info(extra_info, row, columns.extra_info, problems)
    if problems or responses is None:
        return None
    return ResponseRow(
        file.first + row,
        f"{file.name} row {row}",
        source,
        reward["ground_truth"],
        extra_info,
        _last_text(values.get(columns.prompt)),
        responses,
    )


def _responses(value: Any, row: int, column: str, problems: FileProblems) -> list[str] | None:
    responses = [value] if isinstance(value, str) else value
    if not isinstance(responses, list) or not responses or not all(isinstance(text, str) for text in responses):
        problem = "an empty list" if responses == [] else f"{type_name(value)} that is no list of texts"
        advice = "write the responses as a list of texts, or name their column with data.response_key"
        problems.add(problem, advice, row=row, column=column, value=excerpt(value))
        return None
    return responses


def _check_reward_model(value: Any, row: int, column: str, problems: FileProblems) -> None:
    where = {"row": row, "column": column}
    shape = 'write it as {"style": "rule", "ground_truth": "..."}'
    if not isinstance(value, dict):
        problems.add(f"{type_name(value)}, not a dict", shape, **where, value=excerpt(value))
    elif "ground_truth" not in value:
        problems.add(f"no key 'ground_truth' (it has: {', '.join(value) or 'none'})", shape, **where)
    elif value.get("style") == "model":
        advice = "a reward function scores here, no model: leave such rows out, or give them an answer and style rule"
        problems.add("style 'model'", advice, **where)
    else:
        check_ground_truth(value, row, column, problems)


def _last_text(prompt: Any) -> str:
    """The text of a prompt's last message; "" if there is none."""
    if isinstance(prompt, str):
        return prompt
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    content = last.get("content") if isinstance(last, dict) else None
    return content if isinstance(content, str) else ""
