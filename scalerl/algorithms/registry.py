"""Registry of the functions that a configuration key selects by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from scalerl.base.user_code import UserCodeError, check_arguments, is_same_definition, on_forget, place_of
from scalerl.config.names import RegisteredNames

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Functions by name, of one kind.  names: the configuration's list of the registered names, kept up to date."""

    def __init__(self, names: RegisteredNames) -> None:
        self.known_names = names
        self._functions: dict[str, F] = {}
        self._traits: dict[str, dict[str, Any]] = {}

    def register(
        self, name: str, *, arguments: Sequence[str] = (), needs: Sequence[str] = (), **traits: Any
    ) -> Callable[[F], F]:
        """Decorator that registers a function as `name`.  traits: facts about the function that `traits` returns.

        arguments, needs: the arguments that the function is called with, by position and by name.
        Raises ValueError when another function has the name, and for a function that does not take these arguments.
        """

        def add(function: F) -> F:
            check_arguments(function, arguments, needs, f"{self.known_names.kind} {name!r}")
            known = self._functions.get(name)
            if known is not None and not is_same_definition(known, function):
                raise ValueError(
                    f"{self.known_names.kind} {name!r} is already {place_of(known)}: register {place_of(function)} "
                    "under another name"
                )
            self._functions[name] = function
            self.known_names.add(name)
            self._traits[name] = {"needs": tuple(needs), **traits}
            on_forget(function, lambda: self._forget(name))
            return function

        return add

    def _forget(self, name: str) -> None:
        self._functions.pop(name, None)
        self._traits.pop(name, None)
        self.known_names.forget(name)

    def get(self, name: str) -> F:
        """The function registered as `name`.  Raises ValueError naming the known functions."""
        if name in self._functions:
            return self._functions[name]
        raise ValueError(self.known_names.unknown(name))

    def traits(self, name: str) -> dict[str, Any]:
        """The traits that `register` was given for `name`, with "needs" among them."""
        return self._traits[name]

    def names(self) -> list[str]:
        """The registered names, sorted."""
        return sorted(self._functions)


def check_result(function: Callable[..., Any], what: str, result: Any, like: Tensor) -> None:
    """Raises UserCodeError, with the function's place, unless `result` is a tensor of the shape of `like`.

    what: the key that names the function, and which of its results is checked.
    """
    if isinstance(result, Tensor) and result.shape == like.shape:
        return
    got = f"a tensor of shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
    raise UserCodeError(f"{what}: {place_of(function)} returned {got}; return a tensor of shape {list(like.shape)}")
