"""The reward function of a run: one from the user's file, or the rules by data source."""

from __future__ import annotations

import asyncio
import difflib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from scalerl.base.user_code import UserCodeError, cause_of, defined_in, import_file
from scalerl.config.schema import CustomRewardFunctionConfig
from scalerl.rewards.default_score import default_compute_score, default_compute_scores
from scalerl.rewards.errors import RewardError
from scalerl.rewards.function_processes import CallFailed

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
# Arguments of a function that scores many samples in one call: lists of one length.
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


@dataclass(frozen=True)
class RewardFunction:
    """A reward function, called with the four arguments of ARGUMENTS by keyword, and reward_kwargs.

    It returns a number, or a dict with "score" and other values; an async function returns an awaitable of that.
    Each call gets copies: the samples of a prompt share its values, and what a function changes is no other sample's.
    path: the file that defines it; None for the rules of scalerl.
    weights: not empty for several functions, whose values it returns by name (`FunctionsAsOne`).
    """

    fn: Callable[..., Any]
    name: str
    path: str | None = None
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> Any:
        return self.fn(
            data_source=data_source,
            solution_str=solution_str,
            ground_truth=deepcopy(ground_truth),
            extra_info=deepcopy(extra_info),
            **deepcopy(dict(self.reward_kwargs)),
        )

    def __str__(self) -> str:
        return f"{self.name} of {self.path}" if self.path else self.name

    @property
    def is_async(self) -> bool:
        """True if the function, or each of several, is a coroutine function."""
        functions = self.fn.functions.values() if isinstance(self.fn, FunctionsAsOne) else [self.fn]
        return all(
            inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__) for fn in functions
        )


class FunctionsAsOne:
    """Several reward functions as one, which returns the value of each by name, or an awaitable of that.

    Each gets copies of the arguments, so that none sees what another changed.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.functions = functions

    def __call__(self, **arguments: Any) -> dict[str, Any] | Awaitable[dict[str, Any]]:
        values = {name: fn(**deepcopy(arguments)) for name, fn in self.functions.items()}
        return _awaited(values) if any(map(inspect.isawaitable, values.values())) else values


async def _awaited(values: dict[str, Any]) -> dict[str, Any]:
    waiting = [name for name, value in values.items() if inspect.isawaitable(value)]
    return values | dict(zip(waiting, await asyncio.gather(*(values[name] for name in waiting)), strict=True))


@dataclass(frozen=True)
class BatchRewardFunction(RewardFunction):
    """A reward function of many samples, called with the lists of BATCH_ARGUMENTS; returns a list of values."""

    def __call__(
        self,
        data_sources: list[str],
        solution_strs: list[str],
        ground_truths: list[Any],
        extra_infos: list[dict[str, Any] | None],
    ) -> Any:
        return self.fn(
            data_sources=data_sources,
            solution_strs=solution_strs,
            # One by one: in a copy of the list, samples of a prompt would share a value again.
            ground_truths=[deepcopy(truth) for truth in ground_truths],
            extra_infos=[deepcopy(extra_info) for extra_info in extra_infos],
            **deepcopy(dict(self.reward_kwargs)),
        )


def load_reward_function(config: CustomRewardFunctionConfig, arguments: tuple[str, ...] = ARGUMENTS) -> RewardFunction:
    """Loads the function `config.name`, or those of `config.weights`, from the file `config.path`.

    If path is null it is default_compute_score, or default_compute_scores if `arguments` are BATCH_ARGUMENTS.
    Raises RewardError when the file does not exist or import, does not define a name, or when a function cannot be
    called with `arguments` and config.reward_kwargs.
    """
    reward_kwargs, weights = dict(config.reward_kwargs), dict(config.weights)
    if config.path is None:
        for name, value in (("reward_kwargs", reward_kwargs), ("weights", weights)):
            if value:
                raise RewardError(
                    f"custom_reward_function.{name}={value} is set, but custom_reward_function.path is not; set the "
                    "path of the function that it is for"
                )
        if arguments == BATCH_ARGUMENTS:
            return BatchRewardFunction(default_compute_scores, "default_compute_scores")
        return RewardFunction(default_compute_score, "default_compute_score")
    if weights and config.name != CustomRewardFunctionConfig().name:
        raise RewardError(
            f"custom_reward_function.name={config.name} and custom_reward_function.weights={weights} both name "
            "functions; set one of them"
        )
    path = Path(config.path).expanduser()
    try:
        module = import_file(path, "custom_reward_function.path")
    except UserCodeError as error:
        raise RewardError(str(error)) from error
    key = "custom_reward_function.weights" if weights else "custom_reward_function.name"
    functions = {name: _find(module, name, path, key) for name in weights or (config.name,)}
    for name, fn in functions.items():
        _check_signature(fn, name, path, reward_kwargs, arguments)
    kind = BatchRewardFunction if arguments == BATCH_ARGUMENTS else RewardFunction
    fn = FunctionsAsOne(functions) if weights else functions[config.name]
    return kind(fn, ",".join(functions), str(path.resolve()), reward_kwargs, weights)


def _find(module: ModuleType, name: str, path: Path, key: str) -> Callable[..., Any]:
    """The function of a name that the key `key` has."""
    if not hasattr(module, name):
        public = [name for name, value in defined_in(module).items() if callable(value)]
        near = difflib.get_close_matches(name, public, n=1)
        right = near[0] if near else "one of these"
        remedy = f"write {right} in {key}" if key.endswith(".weights") else f"set {key}={right}"
        raise RewardError(
            f"custom_reward_function.path={path} does not define '{name}' "
            f"(it defines: {', '.join(public) or 'nothing'}); {remedy}"
        )
    fn = getattr(module, name)
    if not callable(fn):
        raise RewardError(
            f"'{name}' in custom_reward_function.path={path} is {type(fn).__name__}, not a function; "
            f"write the name of a function in {key}"
        )
    return fn


def _check_signature(
    fn: Callable[..., Any], name: str, path: Path, reward_kwargs: dict[str, Any], arguments: tuple[str, ...]
) -> None:
    taken = sorted(reward_kwargs.keys() & set(arguments))
    if taken:
        raise RewardError(
            f"custom_reward_function.reward_kwargs sets {', '.join(taken)}: each sample gives it; remove it"
        )
    try:
        signature = inspect.signature(fn)
    except ValueError:
        return  # Some builtins and extension functions have no signature.
    try:
        signature.bind(**dict.fromkeys(arguments), **reward_kwargs)
    except TypeError as error:
        wanted = ", ".join([*arguments, *reward_kwargs])
        raise RewardError(
            f"{name}{signature} in custom_reward_function.path={path} cannot be called with the keyword arguments "
            f"{wanted}: {error}; define it as {name}({wanted})"
        ) from None


def cause_of_failed_call(error: BaseException, path: str | None) -> str:
    """Type, message and place of an error, as `user_code.cause_of`, also if it was raised in another process."""
    # The message of a CallFailed holds the cause; the traceback stayed in the other process.
    return str(error) if isinstance(error, CallFailed) else cause_of(error, path)
