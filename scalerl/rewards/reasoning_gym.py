"""Reward rule of reasoning-gym: the task's own rule scores the text between <answer> and </answer>."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from typing import Any

from scalerl.rewards.errors import RewardError
from scalerl.rewards.function_processes import CallFailed, CallTimeout, ProcessPool

# Must be below reward_model.timeout_s, or the deadline of the sample passes first.
TIMEOUT_S = 10.0
MEMORY_BYTES = 2 * 1024**3
# The largest boards and grids have some thousands; a rule would take too much time for more than this.
MAX_ANSWER_CHARS = 50_000
_CLOSE, _OPEN = "</answer>", "<answer>"
# Tasks whose rules give the answer to sympy's parser, which runs it as Python.
PARSED_AS_PYTHON = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
MAX_FORMULA_CHARS = 1000
_FUNCTIONS = "sqrt|exp|log|ln|Abs|pi|(?:a|arc)?(?:sin|cos|tan|sec|csc|cot)h?"
# Numbers, operators, one-letter names and these functions: nothing with attributes, quotes or brackets. Quantifiers are
# possessive, so that numbers are not split on a mismatch, which would take exponential time.
_FORMULA = re.compile(
    r"(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++|"
    rf"(?<![A-Za-z0-9.])(?:{_FUNCTIONS}|[A-Za-z])(?![A-Za-z0-9.])|[-+*/^(), \t])++"
)


def extract_answer(solution_str: str) -> str | None:
    """The text in the last <answer>...</answer>, without white space at its ends; None if there is none."""
    end = solution_str.rfind(_CLOSE)
    start = solution_str.rfind(_OPEN, 0, end) if end >= 0 else -1
    return solution_str[start + len(_OPEN) : end].strip() if start >= 0 else None


def is_formula(text: str) -> bool:
    """True if the text may be given to sympy's parser, which would run anything else as Python."""
    return len(text) <= MAX_FORMULA_CHARS and _FORMULA.fullmatch(text) is not None


def compute_score(solution_str: str, extra_info: dict[str, Any] | None) -> dict[str, Any]:
    """Scores an answer by score_answer of its task, from 0 to 1.

    Returns score (a missing answer, or one that is unsafe to read, is scored as none); acc: True if it is 1; pred: the
    answer, "" for none; failure: "", or why there was nothing to score.
    extra_info: task, options (JSON) and entry (a Python literal), as `scalerl data reasoning_gym` writes them.
    Source: https://github.com/open-thought/reasoning-gym

    Rules run in processes that can be killed; one that evaluates the answer as Python gets only literals or formulas.
    Raises RewardError after TIMEOUT_S, over MEMORY_BYTES, for other extra_info, and without the package.
    """
    task, options, entry = _task_fields(extra_info)
    answer = extract_answer(solution_str)
    failure = "no <answer>...</answer> in the response" if answer is None else _why_unsafe(task, answer)
    arguments = {"task": task, "options": options, "entry": entry, "answer": None if failure else answer}
    try:
        score, error = _pool().call(TIMEOUT_S, arguments)
    except CallTimeout:
        raise RewardError(f"reasoning_gym: task {task} did not score {answer!r:.200} in {TIMEOUT_S:g} s") from None
    except CallFailed as failed:
        raise RewardError(f"reasoning_gym: task {task}, answer {answer!r:.200}: {failed}") from None
    return {"score": score, "acc": score == 1.0, "pred": answer or "", "failure": failure or error}


def _task_fields(extra_info: dict[str, Any] | None) -> tuple[str, str, str]:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise RewardError("reasoning_gym needs the package reasoning-gym: pip install 'scalerl[reasoning-gym]'")
    task, options, entry = ((extra_info or {}).get(key) for key in ("task", "options", "entry"))
    if not (isinstance(task, str) and isinstance(options, str) and isinstance(entry, str)):
        raise RewardError(
            f"reasoning_gym: extra_info has {', '.join(extra_info or {}) or 'nothing'}; needs task, options and entry: "
            "make the rows with scalerl data reasoning_gym"
        )
    return task, options, entry


def _why_unsafe(task: str, answer: str) -> str:
    if len(answer) > MAX_ANSWER_CHARS:
        return f"more than {MAX_ANSWER_CHARS} characters"
    if task in PARSED_AS_PYTHON and not is_formula(answer):
        return "not a formula of numbers, operators, letters and elementary functions"
    return ""


@functools.cache
def _pool() -> ProcessPool:
    return ProcessPool("scalerl.rewards.reasoning_gym_task:score_answer", min(8, os.cpu_count() or 1), MEMORY_BYTES)
