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

from scalerl.config.registered_names import REWARD_MANAGERS
from scalerl.config.schema import CustomRewardFunctionConfig, RewardModelConfig
from scalerl.rewards.calls import Outcome, RewardCaller
from scalerl.rewards.errors import RewardError
from scalerl.rewards.function_processes import CallTimeout
from scalerl.rewards.reward_function import ARGUMENTS, RewardFunction, cause_of_failed_call, load_reward_function
from scalerl.user_code import cause_of, file_of, is_same_definition, is_users_own, on_forget, place_of

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

    extra: other values of the function's dict.  error: why the score is a substitute 0; None if it is not.
    """

    score: float
    extra: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


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
        if not isinstance(result, ScoreResult) or not math.isfinite(result.score):
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
                return parse_result(outcome.value)
            except RewardError as error:
                cause = str(error)
        if self._config.on_error == "zero":
            return ScoreResult(0.0, error=cause)
        raise RewardError(self._describe(request, cause)) from outcome.error

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
            "  Correct the function, or set reward_model.on_error=zero to score such samples 0 and count them."
        )


def parse_result(value: Any) -> ScoreResult:
    """Reads the score from what a reward function returned.  Raises RewardError unless it is a finite number."""
    if not isinstance(value, dict):
        return ScoreResult(_finite(value, "it returned"))
    if "score" not in value:
        keys = ", ".join(map(repr, value)) or "none"
        raise RewardError(f"it returned a dict without 'score' (keys: {keys}); add 'score'")
    return ScoreResult(_finite(value["score"], "its 'score' is"), {k: v for k, v in value.items() if k != "score"})


def _finite(value: Any, what: str) -> float:
    # np.bool_ is not a numbers.Real; the other numpy scalars are.
    if not isinstance(value, numbers.Real | np.bool_):
        raise RewardError(f"{what} {type(value).__name__} {value!r:.80}, not a number; return a float")
    try:
        score = float(value)
    except OverflowError:  # an integer of more than 308 digits
        score = math.inf
    if not math.isfinite(score):
        raise RewardError(f"{what} {score}, not a finite number")
    return score
