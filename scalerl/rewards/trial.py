"""Trial scores: what is wrong with a reward is found on a few rows before a run starts anything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from scalerl.errors import UserError
from scalerl.rewards.manager import RewardManager, ScoreRequest, ScoreResult

log = logging.getLogger(__name__)

# Stands for what the policy would write; a reward function that must tell a trial from a sample can compare with it.
TRIAL_RESPONSE = "I do not know."


def trial_failures(manager: RewardManager, requests: Sequence[ScoreRequest]) -> list[str]:
    """Scores the requests, which end on TRIAL_RESPONSE -> why each that failed did, with the sample shown.

    As in a run the manager's deadline holds, and a failure that reward_model.on_error=zero lets pass is no error here:
    it is logged.
    """
    if not requests:
        return []
    results = asyncio.run(_score_all(manager, requests))
    failures = []
    for request, result in zip(requests, results, strict=True):
        if isinstance(result, ScoreResult):
            if result.error is not None:
                log.warning("sample %s scores 0 (reward_model.on_error=zero): %s", request.sample_name, result.error)
        elif isinstance(result, UserError | ValueError | OSError):
            failures.append(str(result))
        else:
            raise result
    return failures


async def _score_all(manager: RewardManager, requests: Sequence[ScoreRequest]) -> list[ScoreResult | BaseException]:
    return await asyncio.gather(*map(manager.scored, requests), return_exceptions=True)
