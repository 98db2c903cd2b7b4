"""`ConversationText`: a response of several turns as text: who speaks, and what the policy is not trained on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from scalerl.data.chat import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POLICY = "assistant"
# Contents of messages that no chat template has in its own text.
_FIRST, _SECOND = "qz7first7zq", "qz7second7zq"


class ConversationText:
    """Writes responses with the roles that the chat template marks; without a template all is the policy's.

    options: data.chat_template_kwargs.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None, *, with_special_tokens: bool
    ) -> None:
        self.tokenizer, self.options, self.with_special_tokens = tokenizer, options, with_special_tokens

    def of(self, response_ids: Sequence[int], is_sampled: Sequence[bool]) -> str:
        """The text of a response. Each message follows a line with its role; what nothing is trained on is `masked`.

        is_sampled: whether the policy sampled the token, and is trained on it.
        """
        decode = partial(self.tokenizer.decode, skip_special_tokens=False)
        runs: list[tuple[bool, int, int]] = []
        text, at = "", 0
        for sampled, tokens in groupby(is_sampled):
            end = at + len(list(tokens))
            start, text = len(text), f"{text}{decode(list(response_ids[at:end]))}"
            runs.append((sampled, start, len(text)))
            at = end
        shown = []
        for role, start, end in self._messages(text, runs):
            for sampled, first, last in runs:
                part = self._cleaned(text[max(start, first) : min(end, last)]).strip("\n")
                if part.strip():
                    shown.append(f"[{role}]\n{part}" if sampled else f"[{role}, masked]\n{part}")
        return "\n".join(shown)

    def _messages(self, text: str, runs: Sequence[tuple[bool, int, int]]) -> Iterator[tuple[str, int, int]]:
        """Role, start and end of each message. A mark that the policy wrote itself begins none."""
        role, start = POLICY, 0
        for mark in self._marks.finditer(text) if self.roles else ():
            if any(sampled and first < mark.end() <= last for sampled, first, last in runs):
                continue
            yield role, start, mark.start()
            role, start = self.roles[mark[0]], mark.end()
        yield role, start, len(text)

    def _cleaned(self, text: str) -> str:
        for token in () if self.with_special_tokens else self._special_tokens:
            text = text.replace(token, "")
        return text

    @cached_property
    def _special_tokens(self) -> list[str]:
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return [*added, *self.tokenizer.all_special_tokens]

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self.roles, key=len, reverse=True))))

    @cached_property
    def roles(self) -> dict[str, str]:
        """What the template writes between two messages -> the role of the second; what could be of two is left out."""
        roles_of: dict[str, set[str]] = {}
        for before in (POLICY, "user", "tool"):
            for after in (POLICY, "user", "tool", "system"):
                if mark := self._between(before, after):
                    roles_of.setdefault(mark, set()).add(after)
        return {mark: next(iter(roles)) for mark, roles in roles_of.items() if len(roles) == 1}

    def _between(self, before: str, after: str) -> str:
        """The text between two messages; "" where the template has no such conversation."""
        messages = [{"role": "user", "content": "?"}, {"role": POLICY, "content": "!"}]
        messages[len(messages) - (before == POLICY) :] = [{"role": before, "content": _FIRST}]
        is_next = after == POLICY
        if not is_next:
            messages.append({"role": after, "content": _SECOND})
        try:
            text = render(self.tokenizer, messages, options=self.options, add_generation_prompt=is_next)
        except Exception:  # whatever a template raises
            return ""
        rest = text.partition(_FIRST)[2]
        return rest if is_next else rest[: max(0, rest.find(_SECOND))]
