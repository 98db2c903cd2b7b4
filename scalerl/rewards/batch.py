"""The reward manager `batch`: one call of the reward function for all samples that finished since the last call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from scalerl.config.schema import RewardModelConfig
from scalerl.rewards.calls import Outcome
from scalerl.rewards.manager import NaiveRewardManager, ScoreRequest, ScoreResult, register_reward_manager
from scalerl.rewards.reward_function import BATCH_ARGUMENTS, RewardFunction

# Largest number of samples in one call.
MAX_BATCH = 256
# Seconds that the first sample waits for others, unless a call is running.
COLLECT_S = 0.05


@register_reward_manager("batch")
class BatchRewardManager(NaiveRewardManager):
    """Scores batches of samples by one call of the reward function for each batch.

    The function is called with (data_sources, solution_strs, ground_truths, extra_infos, **reward_kwargs) and returns
    a number or dict for each sample. One call runs at a time; the samples that finish meanwhile are the next batch, at
    most MAX_BATCH. config.timeout_s is for one call. A call that raises, is late, or returns another number of values
    fails for all of its samples; a bad value in the list fails for its sample only.
    """

    arguments = BATCH_ARGUMENTS

    def __init__(self, function: RewardFunction, config: RewardModelConfig) -> None:
        super().__init__(function, config)
        self._waiting: list[tuple[ScoreRequest, asyncio.Future[Outcome]]] = []
        self._calls: asyncio.Task | None = None

    async def score(self, request: ScoreRequest) -> ScoreResult:
        loop = asyncio.get_running_loop()
        if self._calls is None or self._calls.done() or self._calls.get_loop() is not loop:
            self._waiting = []  # nobody waits for samples of another loop
            self._calls = loop.create_task(self._call_until_none_waits())
        outcome: asyncio.Future[Outcome] = loop.create_future()
        self._waiting.append((request, outcome))
        return self._result(request, await outcome)

    async def _call_until_none_waits(self) -> None:
        await asyncio.sleep(COLLECT_S)
        while self._waiting:
            # A sample whose score() was cancelled is not scored.
            waiting = [pair for pair in self._waiting if not pair[1].done()]
            batch, self._waiting = waiting[:MAX_BATCH], waiting[MAX_BATCH:]
            if not batch:
                return
            try:
                outcomes = await self._call([request for request, _ in batch])
            except Exception as error:  # too many hung calls: each of these samples reports it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), outcome in zip(batch, outcomes, strict=True):
                if not future.done():
                    future.set_result(outcome)

    async def _call(self, requests: Sequence[ScoreRequest]) -> list[Outcome]:
        outcome = await self._caller.call(
            data_sources=[request.data_source for request in requests],
            solution_strs=[request.solution_str for request in requests],
            ground_truths=[request.ground_truth for request in requests],
            extra_infos=[request.extra_info for request in requests],
        )
        if outcome.timed_out or outcome.error is not None:
            return [outcome] * len(requests)
        try:
            if not self._function.weights:
                return [Outcome(value) for value in _one_for_each(outcome.value, len(requests), "it")]
            lists = [_one_for_each(values, len(requests), name) for name, values in outcome.value.items()]
        except ValueError as error:
            return [Outcome(error=error)] * len(requests)
        return [Outcome(dict(zip(outcome.value, values, strict=True))) for values in zip(*lists, strict=True)]


def _one_for_each(values: Any, num_samples: int, name: str) -> list[Any]:
    try:
        as_list = None if isinstance(values, dict | str) else list(values)
    except TypeError:
        as_list = None
    if as_list is None or len(as_list) != num_samples:
        what = type(values).__name__ + (f" of {len(values)}" if hasattr(values, "__len__") else "")
        raise ValueError(f"{name} returned {what} for {num_samples} samples; return a list, one value for each")
    return as_list
