"""Reward rule of multiple choice: compares the letter that the response chose last with the right letter."""

from __future__ import annotations

import re
from typing import Any

from scalerl.rewards.errors import RewardError
from scalerl.rewards.math_answer import last_boxed

_LETTER = r"(?:\\text\{)?[*_]*\(?([A-Z])\)?[*_]*\}?(?![\w'])"
_NAMED = re.compile(rf"(?i:answer)[*_]*(?:\s+(?i:is))?\s*:?[*_]*\s*(?:(?i:option|choice)\s+)?\$?{_LETTER}")
# "B", "(B)", "B: 12 km", "B. 12 km"; not "A, B".
_IN_BOX = re.compile(rf"{_LETTER}\s*(?:[.:)](?:\s.*)?)?", re.DOTALL)
_ALONE = re.compile(rf"\s*(?:(?i:option|choice)\s+)?{_LETTER}\s*[.:)]?\s*")


def extract_choice(solution_str: str) -> str | None:
    """The capital letter A to Z that a response chose last; None if there is none.

    It is in the last \\boxed{}, or after "answer", "answer:" or "answer is", or is the whole last line. None too if the
    last box holds anything else.
    """
    boxed = last_boxed(solution_str)
    if boxed is not None:
        boxed_letter = _IN_BOX.fullmatch(boxed)
        return boxed_letter[1] if boxed_letter else None
    named = _NAMED.findall(solution_str)
    if named:
        return named[-1]
    lines = solution_str.strip().splitlines()
    alone = _ALONE.fullmatch(lines[-1]) if lines else None
    return alone[1] if alone else None


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Scores a response by its letter.

    Returns score: 1.0 for the right letter, else 0.0; acc: the same as a bool; pred: the letter, "" without one.

    ground_truth: one capital letter, bare or in brackets. Raises RewardError for anything else.
    """
    truth = re.fullmatch(r"\(?([A-Z])\)?", str(ground_truth).strip())
    if truth is None:
        raise RewardError(
            f"multiple_choice: ground truth {ground_truth!r} is no letter A to Z; correct reward_model.ground_truth"
        )
    choice = extract_choice(solution_str)
    correct = choice == truth[1]
    return {"score": float(correct), "acc": correct, "pred": choice or ""}
