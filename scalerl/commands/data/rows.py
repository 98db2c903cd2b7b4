"""Conversion of the original records of each known data set to rows with the five columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from scalerl.commands.data.own_rows import number_text
from scalerl.commands.data.splits import five_columns, question_with
from scalerl.data.problems import FileProblems, excerpt, type_name
from scalerl.data.row_checks import PromptColumns, check_prompt_rows

# Takes (row number, record, instruction, problems); returns a row, or None with the reason added to `problems`.
Convert = Callable[[int, dict[str, Any], str, FileProblems], dict[str, Any] | None]


@dataclass(frozen=True)
class DataSource:
    """A known data set.  columns, optional: the columns that its files have, or may have.

    instruction: text to add after each problem; "": none.
    """

    name: str
    about: str
    columns: tuple[str, ...]
    convert: Convert
    optional: tuple[str, ...] = ()
    instruction: str = ""


def _text(record: dict[str, Any], row: int, column: str, problems: FileProblems) -> str | None:
    value = record[column]
    if isinstance(value, str) and value.strip():
        return value.strip()
    problem = "empty text" if isinstance(value, str) else f"{type_name(value)}, not text"
    problems.add(problem, "restore the original file", row=row, column=column, value=excerpt(value))
    return None


def _gsm8k(row: int, record: dict[str, Any], instruction: str, problems: FileProblems) -> dict[str, Any] | None:
    question, answer = (_text(record, row, column, problems) for column in ("question", "answer"))
    if question is None or answer is None:
        return None
    _, marker, number = answer.rpartition("####")
    truth = number.strip().replace(",", "").replace("$", "")
    if not marker or not truth:
        problems.add(
            "no '#### answer' at the end", "restore the original file", row=row, column="answer", value=excerpt(answer)
        )
        return None
    if not _is_number(truth):
        problem = "an answer behind '####' that is no number"
        problems.add(problem, "write the number, or leave the row out", row=row, column="answer", value=excerpt(truth))
        return None
    extra_info = {"question": question, "answer": answer}
    return five_columns("openai/gsm8k", question_with(instruction, question), "math", truth, extra_info)


def _is_number(truth: str) -> bool:
    """True for an integer, a decimal number or a fraction, with an exponent or without."""
    try:
        return Fraction(truth) is not None
    except (ValueError, ZeroDivisionError):
        return False


def _math(row: int, record: dict[str, Any], instruction: str, problems: FileProblems) -> dict[str, Any] | None:
    question, solution = (_text(record, row, column, problems) for column in ("problem", "solution"))
    if question is None or solution is None:
        return None
    truth = record.get("answer")
    if isinstance(truth, int | float | Decimal):
        try:
            truth = number_text(truth)
        except ValueError as error:
            problems.add(str(error), "write the answer as text", row=row, column="answer", value=excerpt(truth))
            return None
    truth = truth or answer_of_solution(solution)
    if not isinstance(truth, str) or not truth.strip():
        problems.add(
            r"no \boxed{answer}", "restore the original file", row=row, column="solution", value=excerpt(solution)
        )
        return None
    extra_info = {
        "question": question,
        "answer": solution,
        # Numbers in some copies of the data set, "Level 5" in others.
        "level": str(record.get("level") or ""),
        "subject": str(record.get("subject") or record.get("type") or ""),
    }
    messages = question_with(instruction, question)
    return five_columns("DigitalLearningGmbH/MATH-lighteval", messages, "math", truth.strip(), extra_info)


def answer_of_solution(text: str) -> str | None:
    r"""The content of a solution's last \boxed{...} or \fbox{...}, or the word after a \boxed without braces."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix(r"\boxed").removeprefix(r"\fbox").lstrip()
    if not rest.startswith("{"):
        return rest.split("$")[0].split()[0] if rest.split("$")[0].split() else None
    depth = position = 0
    while position < len(rest):
        if rest[position] == "\\":
            position += 1  # An escaped brace does not count.
        else:
            depth += {"{": 1, "}": -1}.get(rest[position], 0)
        if depth == 0:
            return rest[1:position]
        position += 1
    return None


def _dapo(row: int, record: dict[str, Any], instruction: str, problems: FileProblems) -> dict[str, Any] | None:
    # The original has the five columns; only its style differs.
    checked = check_prompt_rows([(row, record)], PromptColumns(), problems)
    if not checked:
        return None
    (_, fields), = checked  # fmt: skip
    if not isinstance(fields.ground_truth, str) or not fields.ground_truth.strip():
        what = "empty text" if isinstance(fields.ground_truth, str) else type_name(fields.ground_truth)
        problem = f"{what} as ground_truth, where an answer belongs"
        problems.add(problem, "restore the original file", row=row, column="reward_model")
        return None
    messages = [{"role": message["role"], "content": message["content"]} for message in fields.messages]
    extra_info = {"original_index": str(fields.extra_info.get("index", ""))}
    return five_columns(fields.data_source, messages, record["ability"].lower(), fields.ground_truth, extra_info)


SOURCES = {
    source.name: source
    for source in (
        DataSource(
            "gsm8k",
            "grade-school word problems: train and test, question and answer ('... #### 72'), jsonl or parquet",
            ("question", "answer"),
            _gsm8k,
            instruction="Think step by step, then write the final number on a last line of its own, after ####.",
        ),
        DataSource(
            "math",
            "competition problems: problem, level, type, solution (with \\boxed{}), json, jsonl or parquet",
            ("problem", "solution"),
            _math,
            optional=("answer", "level", "type", "subject"),
            instruction="Think step by step, then write the final answer in \\boxed{}.",
        ),
        DataSource(
            "dapo",
            "DAPO-Math-17k and sets of its format (AIME 2024): five columns, each problem many times, parquet",
            tuple(PromptColumns().names),
            _dapo,
        ),
    )
}
