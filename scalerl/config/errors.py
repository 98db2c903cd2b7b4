"""`ConfigError`, which reports everything that is wrong with a configuration, and the collector of its violations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from scalerl.errors import UserError

Checked = TypeVar("Checked")


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
        # The configuration as far as it could be read, with defaults in the place of wrong values; None: it could not.
        self.config: Any = None

    def __str__(self) -> str:
        count = len(self.violations)
        title = "The configuration has 1 problem:" if count == 1 else f"The configuration has {count} problems:"
        return "\n".join([title, *(_numbered(i, text) for i, text in enumerate(self.violations, start=1))])


def _numbered(number: int, text: str) -> str:
    head = f"  {number}. "
    return head + text.replace("\n", "\n" + " " * len(head))


class ErrorCollector:
    """Collects the error messages of checks, so that they are raised together."""

    def __init__(self) -> None:
        self.violations: list[str] = []

    def attempt(self, check: Callable[[], Checked]) -> Checked | None:
        """Runs a check and returns its result; notes the message of a ValueError or OSError and returns None."""
        try:
            return check()
        except (ValueError, OSError) as error:
            self.violations.append(str(error))
            return None

    def raise_if_any(self) -> None:
        """Raises one ConfigError with every message, if any check failed."""
        if self.violations:
            raise ConfigError(list(dict.fromkeys(self.violations)))
