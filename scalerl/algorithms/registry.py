"""Named functions that a configuration key selects."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from scalerl.user_code import IMPORT_FILES, UserCodeError, check_arguments, is_same_definition, place_of

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """name -> function. `kind` and `config_key` are what errors call it."""

    def __init__(self, kind: str, config_key: str) -> None:
        self.kind = kind
        self.config_key = config_key
        self._functions: dict[str, F] = {}
        self._traits: dict[str, dict[str, Any]] = {}

    def register(
        self, name: str, *, arguments: Sequence[str] = (), needs: Sequence[str] = (), **traits: Any
    ) -> Callable[[F], F]:
        """Decorator. traits: what a caller must know of the function.

        arguments, needs: what the function is called with, the latter by name.
        Raises ValueError when another has the name, and for a function that cannot be called so.
        """

        def add(function: F) -> F:
            check_arguments(function, arguments, needs, f"{self.kind} {name!r}")
            known = self._functions.get(name)
            if known is not None and not is_same_definition(known, function):
                raise ValueError(
                    f"{self.kind} {name!r} is already {place_of(known)}: register {place_of(function)} under another "
                    "name"
                )
            self._functions[name] = function
            self._traits[name] = {"needs": tuple(needs), **traits}
            return function

        return add

    def get(self, name: str) -> F:
        """Raises ValueError naming the known ones."""
        if name in self._functions:
            return self._functions[name]
        near = difflib.get_close_matches(str(name), self._functions, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{self.config_key}={name!r}: no such {self.kind}; known are {self.names()}.{hint} One of your own: "
            f"name the file that registers it in {IMPORT_FILES}"
        )

    def traits(self, name: str) -> dict[str, Any]:
        """As given to `register`."""
        return self._traits[name]

    def names(self) -> list[str]:
        return sorted(self._functions)


def check_result(function: Callable[..., Any], what: str, found: Any, like: Tensor) -> None:
    """Raises UserCodeError, with the function's place, unless `found` is a tensor of numbers of the shape of `like`.

    what: the key that names the function, and which of its results this is.
    """
    if isinstance(found, Tensor) and found.shape == like.shape:
        return
    got = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    raise UserCodeError(f"{what}: {place_of(function)} returned {got}; return a tensor of shape {list(like.shape)}")
