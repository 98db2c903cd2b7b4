"""The managers `batch`, `dapo` and `prime`, which extend the naive one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from scalerl.base.user_code import imported_files
from scalerl.config.schema import OverlongBufferConfig, RewardModelConfig
from scalerl.rewards.calls import NUM_THREADS, Outcome, RewardCaller
from scalerl.rewards.function_processes import START_TIMEOUT_S, ProcessPool
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


def overlong_penalty(response_length: int, buffer: OverlongBufferConfig) -> float:
    """Penalty of a response's length: 0 up to max_resp_len - len tokens, then falling linearly.

    It is -penalty_factor at max_resp_len, and falls further beyond it.
    Source: Yu et al. 2025, DAPO, arXiv:2503.14476, equation 13 (soft overlong punishment).
    """
    over = response_length - (buffer.max_resp_len - buffer.len)
    return -buffer.penalty_factor * over / buffer.len if over > 0 else 0.0


@register_reward_manager("dapo")
class DAPORewardManager(NaiveRewardManager):
    """Adds overlong_penalty, as a penalty, to the naive manager's results, with reward_model.overlong_buffer.enable.

    A failed sample has none. With overlong_buffer.log, extra has overlong (1 if penalized) and overlong_reward (the
    penalty).
    """

    def __init__(self, function: RewardFunction, config: RewardModelConfig) -> None:
        buffer = config.overlong_buffer
        if buffer.enable and not 0 < buffer.len <= buffer.max_resp_len:
            raise ValueError(
                f"reward_model.overlong_buffer.len={buffer.len}: use 1 to max_resp_len={buffer.max_resp_len} tokens "
                "(the paper: 4096 of 20480), or set enable=false"
            )
        super().__init__(function, config)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        result = await super().score(request)
        buffer = self._config.overlong_buffer
        if not buffer.enable:
            return result
        if request.response_length is None:
            raise ValueError(f"sample {request.sample_name}: reward_manager=dapo needs its response_length")
        penalty = 0.0 if result.error is not None else overlong_penalty(request.response_length, buffer)
        logged = {"overlong": float(penalty < 0), "overlong_reward": penalty} if buffer.log else {}
        return replace(result, extra=result.extra | logged, penalty=penalty)


@register_reward_manager("prime")
class PrimeRewardManager(NaiveRewardManager):
    """The naive manager with up to 8 processes (one per CPU, at most 4 GiB each) in place of threads.

    A call past its deadline is killed, even if it never releases the GIL, and a call that crashes its process affects
    no other. Each process imports the function's file, so state between calls is per process. Arguments, values and
    reward_kwargs are pickled.
    """

    def _new_caller(self) -> RewardCaller:
        # The comma says that the process returns values by name, of one name too.
        name = "".join(f"{each}," for each in self._function.weights) or self._function.name
        target = f"{self._function.path or 'scalerl.rewards.default_score'}:{name}"
        self._pool = ProcessPool(target, min(NUM_THREADS, os.cpu_count() or 1), user_files=imported_files())
        called = RewardFunction(self._call, self._function.name, self._function.path)
        # The pool enforces the deadline. A thread also waits until a process is free and has started.
        return RewardCaller(called, NUM_THREADS * (self._config.timeout_s + START_TIMEOUT_S))

    def _call(self, **arguments: Any) -> Any:
        return self._pool.call(self._config.timeout_s, arguments | dict(self._function.reward_kwargs))

    def close(self) -> None:
        super().close()
        self._pool.close()
