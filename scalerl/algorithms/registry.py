"""Named functions that a configuration key selects."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """name -> function. `kind` and `config_key` are what errors call it."""

    def __init__(self, kind: str, config_key: str) -> None:
        self.kind = kind
        self.config_key = config_key
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator. Raises ValueError when another function has the name."""

        def add(function: F) -> F:
            known = self._functions.get(name)
            # A module that is imported again registers the same function once more.
            if known is not None and (known.__module__, known.__qualname__) != (
                function.__module__,
                function.__qualname__,
            ):
                raise ValueError(
                    f"{self.kind} {name!r} is already {known.__module__}.{known.__qualname__}: register "
                    f"{function.__module__}.{function.__qualname__} under another name"
                )
            self._functions[name] = function
            return function

        return add

    def get(self, name: str) -> F:
        """Raises ValueError naming the known ones."""
        if name in self._functions:
            return self._functions[name]
        near = difflib.get_close_matches(str(name), self._functions, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{self.config_key}={name!r}: no such {self.kind}; known are {self.names()}.{hint}")

    def names(self) -> list[str]:
        return sorted(self._functions)
