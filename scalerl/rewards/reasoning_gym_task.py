"""Scoring by the rules of reasoning-gym, for a separate process."""

from __future__ import annotations

import ast
import functools
import json
import math
import re
from typing import Any

from reasoning_gym.algorithmic import binary_matrix, number_sorting, spiral_matrix, string_insertion  # pyright: ignore[reportMissingImports]  # an optional package
from reasoning_gym.factory import create_dataset  # pyright: ignore[reportMissingImports]  # an optional package
from reasoning_gym.games import n_queens  # pyright: ignore[reportMissingImports]  # an optional package

from scalerl.rewards.reasoning_gym import is_formula

# Tasks whose rules call eval() on the model's answer, which is a list or board as a Python literal.
EVALUATES_ANSWERS = (binary_matrix, n_queens, number_sorting, spiral_matrix, string_insertion)
for _module in EVALUATES_ANSWERS:
    _module.eval = ast.literal_eval  # pyright: ignore[reportAttributeAccessIssue]
# Tasks whose rules evaluate a part of the entry, which comes from a data file.
_EVALUATED_PARTS = {
    "bitwise_arithmetic": lambda entry: entry["metadata"]["problem"],
    "intermediate_integration": lambda entry: entry["metadata"]["integrand"],
    "polynomial_multiplication": lambda entry: entry["answer"],
    "simple_integration": lambda entry: entry["metadata"]["integrand"],
}
_HEXADECIMAL = re.compile(r"(?:0x[0-9a-f]++|[-+*&|^~<>() ])+")


def score_answer(task: str, options: str, entry: str, answer: str | None) -> tuple[float, str]:
    """Scores an answer: (score, ""), or (0, the error) if the rule raised for it.

    Raises ValueError for an entry or options that cannot be used, and MemoryError.
    """
    dataset = _dataset(task, options)
    stored = ast.literal_eval(entry)
    if not isinstance(stored, dict) or not stored.keys() >= {"question", "answer", "metadata"}:
        raise ValueError("extra_info.entry has no question, answer and metadata")
    _check_evaluated_part(task, stored)
    try:
        score = float(dataset.score_answer(answer, stored))
    except MemoryError:
        raise
    except Exception as error:  # most rules trust the form of the answer
        return 0.0, f"{type(error).__name__}: {error}"
    return (score, "") if math.isfinite(score) else (0.0, f"the rule gave {score}")


def _check_evaluated_part(task: str, entry: dict[str, Any]) -> None:
    part_of = _EVALUATED_PARTS.get(task)
    if part_of is None:
        return
    text = str(part_of(entry))
    if not is_formula(text) and not _HEXADECIMAL.fullmatch(text):
        raise ValueError(f"extra_info.entry holds {text!r:.200} where {task} has a formula; it is not run")


@functools.lru_cache(maxsize=256)
def _dataset(task: str, options: str) -> Any:
    return create_dataset(task, **json.loads(options))
