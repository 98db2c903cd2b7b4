"""Reward managers, which score samples and handle whatever the reward function does."""

from __future__ import annotations

import inspect
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from scalerl.base.user_code import cause_of, file_of, is_same_definition, is_users_own, on_forget, place_of
from scalerl.config.names import REWARD_MANAGERS
from scalerl.config.schema import CustomRewardFunctionConfig, RewardModelConfig
from scalerl.rewards.calls import Outcome, RewardCaller
from scalerl.rewards.errors import RewardError
from scalerl.rewards.function_processes import CallTimeout
from scalerl.rewards.reward_function import ARGUMENTS, RewardFunction, cause_of_failed_call, load_reward_function

ON_ERROR = ("stop", "zero")
_MAX_RESPONSE_CHARS = 500


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A sample to score.  sample_name: its name in errors.  prompt_str, solution_str: decoded text."""

    sample_name: str
    data_source: str
    prompt_str: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] | None = None
    # Number of tokens behind the prompt; None if only the text is known.
    response_length: int | None = None


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """The score of a sample, a finite number.

    extra: other values of the function's dict. A number among them (`number_of`) is Python's bool, int or float; one
    that is not finite is None.  error: why the sample has no score, so that 0 stands for it; None if it has one.
    penalty: added to the score where the policy learns from it, and nowhere else: of a length limit, for example.
    """

    score: float
    extra: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    penalty: float = 0.0

    def __post_init__(self) -> None:
        # Here, so that metrics, filters and dumps agree on what a number is, whoever made the result.
        plain = {name: number_of(value) if _is_number(value) else value for name, value in self.extra.items()}
        object.__setattr__(self, "extra", plain)


class RewardManager(ABC):
    """Base of reward managers, which score many samples concurrently.

    arguments: names of the keyword arguments that its reward function is called with.
    """

    arguments: ClassVar[tuple[str, ...]] = ARGUMENTS

    @abstractmethod
    def __init__(self, function: RewardFunction, config: RewardModelConfig) -> None: ...

    @abstractmethod
    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Scores a sample.

        Raises RewardError, showing the sample, when it cannot be scored and config.on_error is "stop".
        """

    async def scored(self, request: ScoreRequest) -> ScoreResult:
        """Calls `score`, and checks what a manager of the user's does, which gets a copy of the request's values.

        Raises RewardError, with sample and line, if it raises or returns anything but a ScoreResult with a finite
        score.
        """
        if is_users_own(type(self)):
            extra_info = deepcopy(request.extra_info)
            request = replace(request, ground_truth=deepcopy(request.ground_truth), extra_info=extra_info)
        try:
            result = await self.score(request)
        except RewardError:
            raise
        except Exception as error:
            if not is_users_own(type(self)):
                raise
            raise RewardError(self._blame(request, f"raised {cause_of(error, file_of(type(self)))}")) from error
        if not isinstance(result, ScoreResult) or number_of(result.score) is None:
            raise RewardError(
                self._blame(request, f"returned {result!r:.200}; return a ScoreResult with a finite score")
            )
        return result

    def _blame(self, request: ScoreRequest, what: str) -> str:
        return f"reward manager {place_of(type(self))} {what}, on sample {request.sample_name}"

    def close(self) -> None:  # noqa: B027 - most managers hold nothing
        """Frees threads and loops; score() must not be called afterwards."""


_MANAGERS: dict[str, type[RewardManager]] = {}


def _forget(name: str) -> None:
    _MANAGERS.pop(name, None)
    REWARD_MANAGERS.forget(name)


Manager = TypeVar("Manager", bound=RewardManager)


def register_reward_manager(name: str) -> Callable[[type[Manager]], type[Manager]]:
    """Class decorator that registers the manager for reward_model.reward_manager=name.

    Raises ValueError when the name is taken, or for anything but a subclass of RewardManager that defines `score`.
    """

    def register(manager: type[Manager]) -> type[Manager]:
        if not (isinstance(manager, type) and issubclass(manager, RewardManager)) or inspect.isabstract(manager):
            raise ValueError(
                f"register_reward_manager({name!r}): {place_of(manager)} must be a class that derives from "
                "RewardManager or NaiveRewardManager of scalerl.rewards, with __init__ and score"
            )
        if not is_same_definition(_MANAGERS.get(name, manager), manager):
            other = place_of(_MANAGERS[name])
            raise ValueError(f"register_reward_manager({name!r}): {other} is registered already; use another name")
        _MANAGERS[name] = manager
        REWARD_MANAGERS.add(name)
        on_forget(manager, lambda: _forget(name))
        return manager

    return register


def get_reward_manager(name: str) -> type[RewardManager]:
    """The manager registered as `name`.  Raises ValueError, listing the known names, for an unknown one."""
    if name not in _MANAGERS:
        raise ValueError(REWARD_MANAGERS.unknown(name))
    return _MANAGERS[name]


def build_reward_manager(config: RewardModelConfig, custom: CustomRewardFunctionConfig) -> RewardManager:
    """Builds the configured manager with the configured function.

    Raises as get_reward_manager and load_reward_function.
    """
    manager = get_reward_manager(config.reward_manager)
    return manager(load_reward_function(custom, manager.arguments), config)


@register_reward_manager("naive")
class NaiveRewardManager(RewardManager):
    """Scores each sample by one call of the reward function, sync or async, within config.timeout_s seconds.

    A call fails if it raises, takes longer, or returns anything but a finite number (or a dict with one as "score").
    Then config.on_error "stop" raises RewardError, and "zero" scores 0 with ScoreResult.error set.
    """

    def __init__(self, function: RewardFunction, config: RewardModelConfig) -> None:
        if config.on_error not in ON_ERROR:
            raise ValueError(f"reward_model.on_error={config.on_error!r}: use one of {', '.join(ON_ERROR)}")
        if not config.timeout_s > 0:
            raise ValueError(f"reward_model.timeout_s={config.timeout_s}: use more than 0 seconds")
        self._function = function
        self._config = config
        self._caller = self._new_caller()

    def _new_caller(self) -> RewardCaller:
        return RewardCaller(self._function, self._config.timeout_s)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        outcome = await self._caller.call(
            data_source=request.data_source,
            solution_str=request.solution_str,
            ground_truth=request.ground_truth,
            extra_info=request.extra_info,
        )
        return self._result(request, outcome)

    def close(self) -> None:
        self._caller.close()

    def _result(self, request: ScoreRequest, outcome: Outcome) -> ScoreResult:
        """The result of a call; one that failed raises RewardError or scores 0, as config.on_error says."""
        cause = self._why_failed(outcome)
        if cause is None:
            try:
                return self._parsed(outcome.value)
            except RewardError as error:
                cause = str(error)
        if self._config.on_error == "zero":
            return ScoreResult(0.0, error=cause)
        raise RewardError(self._describe(request, cause)) from outcome.error

    def _parsed(self, value: Any) -> ScoreResult:
        """The result of the function's value; of several values, the weighted sum, with each score in `extra`."""
        weights = self._function.weights
        if not weights:
            return parse_result(value)
        score, extra = 0.0, {}
        for name, weight in weights.items():
            try:
                result = parse_result(value[name])
            except RewardError as error:
                raise RewardError(f"{name}: {error}") from None
            score += weight * result.score
            own = {name: result.score} | result.extra
            if taken := sorted(extra.keys() & own.keys()):
                raise RewardError(
                    f"{name}: what it returns and its name have {', '.join(taken)} in common with another function of "
                    "custom_reward_function.weights; rename one"
                )
            extra |= own
        return ScoreResult(_finite(score, "the weighted sum is"), extra)

    def _why_failed(self, outcome: Outcome) -> str | None:
        if outcome.timed_out or isinstance(outcome.error, CallTimeout):
            return f"no result after reward_model.timeout_s={self._config.timeout_s:g} s"
        if outcome.error is not None:
            return cause_of_failed_call(outcome.error, self._function.path)
        return None

    def _describe(self, request: ScoreRequest, cause: str) -> str:
        response = request.solution_str
        cut = (
            f" (first {_MAX_RESPONSE_CHARS} of {len(response)} characters)"
            if len(response) > _MAX_RESPONSE_CHARS
            else ""
        )
        return (
            f"reward function {self._function} failed on sample {request.sample_name}\n"
            f"  cause: {cause}\n"
            f"  data_source: {request.data_source!r}\n"
            f"  ground_truth: {request.ground_truth!r}\n"
            f"  response{cut}: {response[:_MAX_RESPONSE_CHARS]!r}\n"
            "  Correct the function, or set reward_model.on_error=zero to take such samples for wrong and count them."
        )


def parse_result(value: Any) -> ScoreResult:
    """Reads the score from what a reward function returned.  Raises RewardError unless it is a finite number."""
    if not isinstance(value, dict):
        return ScoreResult(_finite(value, "it returned"))
    if "score" not in value:
        keys = ", ".join(map(repr, value)) or "none"
        raise RewardError(f"it returned a dict without 'score' (keys: {keys}); add 'score'")
    return ScoreResult(_finite(value["score"], "its 'score' is"), {k: v for k, v in value.items() if k != "score"})


def number_of(value: Any) -> bool | int | float | None:
    """The value as Python's bool, int or float if it is a finite number, numpy's scalars included; None if not."""
    if not _is_number(value):
        return None
    if isinstance(value, bool | np.bool_):
        return bool(value)
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return None
    if not math.isfinite(number):
        return None
    return int(value) if isinstance(value, numbers.Integral) else number


def _is_number(value: Any) -> bool:
    # np.bool_ is not a numbers.Real; the other numpy scalars are.
    return isinstance(value, numbers.Real | np.bool_)


def _finite(value: Any, what: str) -> float:
    if not _is_number(value):
        raise RewardError(f"{what} {type(value).__name__} {value!r:.80}, not a number; return a float")
    number = number_of(value)
    if number is None:
        shown = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else value
        raise RewardError(f"{what} {shown}, not a finite number")
    return float(number)
