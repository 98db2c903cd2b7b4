"""`ErrorCollector`: runs several checks and raises the errors of all of them as one ConfigError."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from scalerl.config import ConfigError

Checked = TypeVar("Checked")


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
