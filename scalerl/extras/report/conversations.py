"""Samples before and after, as conversations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from scalerl.data.conversation_text import POLICY
from scalerl.extras.report.run_files import Answer, RunFiles

# Samples that a page shows, and characters of a message.
MAX_SAMPLES, MAX_CHARACTERS = 6, 4000
# As `ConversationText` begins a message.
_ROLE = re.compile(r"^\[(\w+)(, masked)?\]$", re.MULTILINE)


@dataclass(frozen=True)
class Message:
    """A message of a conversation.  is_masked: the policy is not trained on it."""

    role: str
    text: str
    is_masked: bool = False


@dataclass(frozen=True)
class Compared:
    """A prompt, and what was answered in each of some steps: step -> (messages, score)."""

    prompt: str
    ground_truth: str
    answers: dict[int, tuple[list[Message], float]]


def messages_of(response: str) -> list[Message]:
    """The messages of a response: those that its text marks, or one of the policy."""
    parts = _ROLE.split(response)
    first = [Message(POLICY, _shortened(parts[0]))] if parts[0].strip() else []
    rest = [
        Message(role, _shortened(text), bool(masked))
        for role, masked, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    ]
    return first + rest or [Message(POLICY, "")]


def _shortened(text: str) -> str:
    text = text.strip("\n")
    rest = len(text) - MAX_CHARACTERS
    return text if rest <= 0 else f"{text[:MAX_CHARACTERS]} … ({rest} more characters)"


def compared(run: RunFiles) -> list[Compared]:
    """The prompts that the first and the last step with answers share, those whose score changed most first.

    Where they share none, as the dumps of two steps, some of each.
    """
    steps = sorted(run.answers)
    if not steps:
        return []
    before, after = ({answer.prompt: answer for answer in run.answers[step]} for step in (steps[0], steps[-1]))
    shown = sorted(
        (prompt for prompt in after if prompt in before),
        key=lambda prompt: -abs(after[prompt].score - before[prompt].score),
    )
    shown = shown or [*list(before)[: MAX_SAMPLES // 2], *after]
    return [_one(prompt, steps, [before, after]) for prompt in shown[:MAX_SAMPLES]]


def _one(prompt: str, steps: Sequence[int], answers: Sequence[dict[str, Answer]]) -> Compared:
    found = {
        step: (messages_of(mine[prompt].response), mine[prompt].score)
        for step, mine in zip((steps[0], steps[-1]), answers, strict=True)
        if prompt in mine
    }
    truth = next(mine[prompt].ground_truth for mine in reversed(answers) if prompt in mine)
    return Compared(_shortened(prompt), truth, found)
