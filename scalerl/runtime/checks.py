"""Checks that are all made before the first complaint."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from scalerl.config import ConfigError

Checked = TypeVar("Checked")


class Findings:
    """What checks complained of."""

    def __init__(self) -> None:
        self.violations: list[str] = []

    def run(self, check: Callable[[], Checked]) -> Checked | None:
        """The check's result, or None with its complaint noted."""
        try:
            return check()
        except (ValueError, OSError) as error:
            self.violations.append(str(error))
            return None

    def raise_if_any(self) -> None:
        """Raises ConfigError."""
        if self.violations:
            raise ConfigError(list(dict.fromkeys(self.violations)))
