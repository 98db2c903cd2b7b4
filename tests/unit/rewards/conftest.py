"""Scores by a manager and a file of the test's own."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scalerl.config.schema import CustomRewardFunctionConfig, RewardModelConfig
from scalerl.rewards import build_reward_manager


@pytest.fixture
def scores_of(tmp_path: Path) -> Callable[..., list]:
    """scores_of(manager, source, requests): what the manager makes of them with the file's function; None: no file."""

    def scores(manager, source, requests, *, weights=None, reward_kwargs=None, return_exceptions=False, **config: Any):
        path = tmp_path / "reward.py"
        if source is not None:
            path.write_text(textwrap.dedent(source))
        custom = CustomRewardFunctionConfig(
            path=None if source is None else str(path), reward_kwargs=reward_kwargs or {}, weights=weights or {}
        )
        rewards = build_reward_manager(RewardModelConfig(reward_manager=manager, **config), custom)

        async def run() -> list:
            return await asyncio.gather(*map(rewards.score, requests), return_exceptions=return_exceptions)

        try:
            return asyncio.run(asyncio.wait_for(run(), 120))
        finally:
            rewards.close()

    return scores
