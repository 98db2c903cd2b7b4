"""`ConfigError`, which reports everything that is wrong with a configuration at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalerl.errors import UserError


class ConfigError(UserError):
    """Everything that is wrong with a configuration, in one error.

    Args:
        violations: at least one text, each "key = value: limit; what to set".
    """

    def __init__(self, violations: Sequence[str]) -> None:
        assert violations, "a ConfigError needs a violation"
        # Pickling between processes calls the class with `args`: the list, not its text.
        super().__init__(list(violations))
        self.violations = list(violations)
        # The configuration as far as it could be read, with defaults in the place of what is wrong; None: it could not.
        self.config: Any = None

    def __str__(self) -> str:
        count = len(self.violations)
        title = "The configuration has 1 problem:" if count == 1 else f"The configuration has {count} problems:"
        return "\n".join([title, *(_numbered(i, text) for i, text in enumerate(self.violations, start=1))])


def _numbered(number: int, text: str) -> str:
    head = f"  {number}. "
    return head + text.replace("\n", "\n" + " " * len(head))
