"""`ErrorCollector`: makes every check and raises what all of them complained of, at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from scalerl.config import ConfigError

Checked = TypeVar("Checked")


class ErrorCollector:
    """The complaints of the checks that were made so far."""

    def __init__(self) -> None:
        self.violations: list[str] = []

    def attempt(self, check: Callable[[], Checked]) -> Checked | None:
        """The check's result, or None with its complaint noted."""
        try:
            return check()
        except (ValueError, OSError) as error:
            self.violations.append(str(error))
            return None

    def raise_if_any(self) -> None:
        """Raises one ConfigError with every complaint."""
        if self.violations:
            raise ConfigError(list(dict.fromkeys(self.violations)))
