"""The reward manager `prime`: calls the reward function in other processes, so that Python code runs in parallel."""

from __future__ import annotations

import os
from typing import Any

from scalerl.base.user_code import imported_files
from scalerl.rewards.calls import NUM_THREADS, RewardCaller
from scalerl.rewards.function_processes import START_TIMEOUT_S, ProcessPool
from scalerl.rewards.manager import NaiveRewardManager, register_reward_manager
from scalerl.rewards.reward_function import RewardFunction


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
